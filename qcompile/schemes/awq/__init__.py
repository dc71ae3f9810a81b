"""AWQ checkpoints: what AutoAWQ, GPTQModel and AutoRound write."""
