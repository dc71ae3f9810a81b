"""Rows of the last layer that no logits are made of are not computed.

A prompt needs keys and values of every token, but only the last token's output. Models cut the
others off after the last norm; what works row by row before can do with the rows that are left, up
to the attention.

Before: ``norm(x + mlp(x))[:, -1:, :]``. After: ``y = x[:, -1:, :]; norm(y + mlp(y))``.
Always holds: only nodes whose every reader is cut change, and they stay where they are; each row is
computed as before. Nothing changes where all rows are kept, or an unknown number of them.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from qcompile.passes.canonicalize.linear import LINEAR
from qcompile.program import Program
from qcompile.sizes import is_number, known_true
from qcompile.writes import may_write

_EVERY = slice(None)
_FUNCTIONS = frozenset(
    (
        *(operator.add, operator.sub, operator.mul, operator.truediv, operator.neg, operator.pow),
        *(torch.add, torch.sub, torch.mul, torch.div, torch.neg, torch.pow, torch.square),
        *(torch.rsqrt, torch.sqrt, torch.tanh, torch.sigmoid, torch.relu),
        *(functional.silu, functional.gelu, functional.relu, functional.sigmoid, functional.tanh),
    )
)
_METHODS = frozenset(
    (
        *("to", "float", "type_as", "contiguous", "add", "sub", "mul", "div", "neg", "pow"),
        *("square", "rsqrt", "sqrt", "tanh", "sigmoid", "relu"),
    )
)
_OVER_COLUMNS = ("mean", "sum")


@dataclass(frozen=True)
class KeepLastRows:
    """See the module's text."""

    name: str = "canonicalize.last_rows"

    def run(self, program: Program) -> int:
        """Rewrite the program; the number of nodes that compute fewer rows."""
        return sum(_rewrite(program, node) for node in list(program.graph.nodes))


def _rewrite(program: Program, cut: fx.Node) -> int:
    if not _keeps_fewer(cut):
        return 0
    kept = _by_rows(cut)
    if not any(node.target is LINEAR for node in kept):
        return 0  # a cut costs as much as the rest
    rows = _value(cut).shape[1]
    index: Any = fx.map_arg(cut.args[1], lambda node: int(node.meta["example_value"]))
    new: dict[fx.Node, fx.Node] = {}

    def fewer(node: fx.Node) -> fx.Node:
        if node in new or not _has_rows(node, cut):
            return new.get(node, node)
        new[node] = program.graph.call_function(operator.getitem, (node, index))
        # No module stack: it stands with the nodes that read it.
        new[node].meta["example_value"] = _value(node).narrow(1, 0, rows)
        return new[node]

    for node in kept:
        with program.graph.inserting_before(node):
            new[node] = program.graph.node_copy(node, fewer)
        shape = (_value(node).shape[0], rows, *_value(node).shape[2:])
        new[node].meta = {**node.meta, "example_value": _value(node).new_empty(shape)}
    cut.replace_all_uses_with(new[kept[-1]])
    for node in (cut, *reversed(kept)):
        program.graph.erase_node(node)
    return len(kept)


def _keeps_fewer(node: fx.Node) -> bool:
    """Whether a node cuts ``[B, S, K]`` to some last rows, a known number of them."""
    if node.target is not operator.getitem or not isinstance(node.args[0], fx.Node):
        return False
    index, before, after = node.args[1], _value(node.args[0]), _value(node)
    if not isinstance(index, tuple) or len(index) not in (2, 3) or before is None or after is None:
        return False
    whole = all(part == _EVERY for place, part in enumerate(index) if place != 1)
    cut = isinstance(index[1], slice) and index[1] != _EVERY and index[1].step is None
    if not whole or not cut or before.dim() != 3 or after.dim() != 3:
        return False
    numbers = [given.meta.get("example_value") for given in node.all_input_nodes[1:]]
    if not all(isinstance(number, (int, torch.SymInt)) and is_number(number) for number in numbers):
        return False
    return is_number(after.shape[1]) and not known_true(before.shape[1] == after.shape[1])


def _by_rows(cut: fx.Node) -> list[fx.Node]:
    """Nodes that can do with the rows that are kept, in graph order; the cut's input is last."""
    readers = {cut}
    kept: list[fx.Node] = []
    node = cut.prev
    while node.op != "root":
        if node.users and all(user in readers for user in node.users) and _is_by_rows(node, cut):
            readers.add(node)
            kept.insert(0, node)
        node = node.prev
    return kept if kept and kept[-1] is cut.args[0] else []


def _is_by_rows(node: fx.Node, cut: fx.Node) -> bool:
    """Whether each row of a node's result comes from the same row of what it reads."""
    if not _has_rows(node, cut) or may_write(node):
        return False
    if node.target is LINEAR:
        return _has_rows(node.args[0], cut)
    if node.op == "call_method" and node.target in _OVER_COLUMNS:
        columns = node.args[1:] or (node.kwargs.get("dim"),)
        return columns in ((-1,), ([-1],), ((-1,),)) and node.kwargs.get("keepdim") is True
    known = node.target in (_METHODS if node.op == "call_method" else _FUNCTIONS)
    # A tensor of two dimensions would be spread over rows.
    inputs = [given for given in node.all_input_nodes if _value(given) is not None]
    return known and all(_has_rows(given, cut) or _value(given).dim() < 2 for given in inputs)


def _has_rows(node: Any, cut: fx.Node) -> bool:
    """Whether a node is ``[B, S, ...]`` as what is cut."""
    value = _value(node)
    if value is None or value.dim() != 3:
        return False
    before = _value(cut.args[0])
    return all(known_true(value.shape[i] == before.shape[i]) for i in (0, 1))


def _value(node: Any) -> Any:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None
