"""Checkpoint folders as Hugging Face lays them out: tensors in shards, settings in JSON."""
