"""What the vendor's operators demand of a call: one file an operator.

Comes in: a call, with real tensors or with tensors on the meta device. Goes out: the first rule
that the call breaks, with its source. Always holds: planning and the emulator ask the same rules,
so that a plan refuses what a device would refuse, in the same words.
"""
