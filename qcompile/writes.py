"""Which nodes of a graph change tensors that others read.

Comes in: a node as dynamo traced it. Goes out: whether it may write to a tensor that exists before.
Always holds: a node that writes is never missed among torch's own spellings; a pass that moves or
joins reads must not move them over such a node.
"""

from __future__ import annotations

import inspect

import torch
from torch import fx

# Of the module operator, whose `and_` and `is_` end as methods that write do.
_IN_PLACE = frozenset(
    (
        *("setitem", "delitem", "iadd", "iand", "ifloordiv", "ilshift", "imatmul", "imod"),
        *("imul", "ior", "ipow", "irshift", "isub", "itruediv", "ixor"),
    )
)


def may_write(node: fx.Node) -> bool:
    """Whether a node may change a tensor that exists before it."""
    target = node.target
    if node.op == "call_method":
        return str(target).endswith("_") or str(target) == "__setitem__" or "out" in node.kwargs
    if node.op != "call_function":
        return False
    if isinstance(target, torch._ops.OpOverload):
        return bool(target._schema.is_mutable)
    if isinstance(target, torch._ops.OpOverloadPacket):
        return any(getattr(target, name)._schema.is_mutable for name in target.overloads())
    name = getattr(target, "__name__", "")
    if getattr(target, "__module__", "") == "_operator":
        return name in _IN_PLACE
    return name.endswith("_") or "out" in node.kwargs or _asks_in_place(node)


def _asks_in_place(node: fx.Node) -> bool:
    """Whether a function of ``torch.nn`` is told to work in place, by name or by position."""
    if "inplace" in node.kwargs:
        return bool(node.kwargs["inplace"])
    try:
        names = list(inspect.signature(node.target).parameters)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # a function of C, which takes no such flag
        return False
    place = names.index("inplace") if "inplace" in names else len(node.args)
    return place < len(node.args) and bool(node.args[place])
