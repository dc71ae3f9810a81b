"""Measurements, side by side with peers in one run.

Comes in: a checkpoint or shapes. Goes out: tables of medians and ratios, pictures, records.
Always holds: what is compared takes turns, so that a busy machine slows all of it; numbers in the
documentation name the command that printed them. ``qcompile bench`` and
``python -m qcompile.bench.report`` are the ways in; ``workers`` holds what runs in processes of its
own.
"""
