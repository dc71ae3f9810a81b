"""Measurements, side by side with peers in one run.

Comes in: a checkpoint or shapes. Goes out: a table of medians and ratios.
Always holds: what is compared runs in turns in the same process, so that a busy machine slows all
of it; numbers in the documentation name the command that printed them.
"""
