"""compressed-tensors checkpoints: what llm-compressor and AutoRound write."""
