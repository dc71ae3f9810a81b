"""GPTQ checkpoints: what AutoGPTQ, GPTQModel, AutoRound and transformers write and read."""
