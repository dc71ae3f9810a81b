"""Triton code. Only what launches or compiles kernels imports it, for it imports ``triton``."""
