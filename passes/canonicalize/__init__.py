"""One node form for each kind of weight use.

Comes in: a program in either dialect (torch functions from dynamo, ATen ops from export).
Goes out: ``aten.linear(x, w, bias)`` and ``aten.embedding(w, ids)`` wherever ``w`` is a weight.
Always holds: uses that are not understood are left as they are; nothing changes its value.
"""
