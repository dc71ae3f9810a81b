"""Checkpoint schemes: one file or folder each."""
