"""Changes of what is stored.

Comes in: a plan. Goes out: weights in the layouts that their kernels want.
Always holds: weights are streamed in runs of rows, so the peak is the packed model plus one run.
"""
