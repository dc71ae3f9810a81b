"""Gated layers as one native call up to their last product.

Before: ``mul(silu(panel_linear(x, a, ...)), panel_linear(x, b, ...))``. After: ``panel_gated(x,
[a, b], ...)``, which turns the activations into digits once and writes nothing but the result.
Always holds: both products keep their numerics and their rounding to the dtype of the
activations; the function is computed in float32, as Inductor does. Products that something else
reads, or whose bias is computed in the graph, stay as they are, and so do those of few rows: there
memory sets the pace, and two products side by side are read a little faster than halves of both.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from qcompile.backends.cpu.panel import library
from qcompile.backends.cpu.siblings import is_constant
from qcompile.program import Program
from qcompile.sizes import is_number
from qcompile.writes import may_write

# function(x @ w0.T + b0) * (x @ w1.T + b1); parts, biases and shapes as in panel_linears.
library.define(
    "panel_gated(Tensor x, Tensor[] parts, Tensor?[] biases, int[] shapes, int function,"
    " int digits) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)

_LINEAR = torch.ops.qcompile_cpu.panel_linear.default
_TIMES = (operator.mul, torch.mul, torch.ops.aten.mul.Tensor)
_SILU, _GELU_TANH = 0, 1  # as panel.h has them
_FEW = 8  # rows


@torch.library.register_fake("qcompile_cpu::panel_gated")
def _shape(
    x: torch.Tensor,
    parts: list[torch.Tensor],
    biases: list[torch.Tensor | None],
    shapes: list[int],
    function: int,
    digits: int,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], shapes[0]))


@dataclass(frozen=True)
class GateProducts:
    """See the module's text."""

    name: str = "cpu.gated"

    def run(self, program: Program) -> int:
        """Join what can be joined; the number of layers that were."""
        order = {node: place for place, node in enumerate(program.graph.nodes)}
        written = [place for node, place in order.items() if may_write(node)]
        changed = 0
        for node in list(program.graph.nodes):
            found = _match(node)
            if found is None:
                continue
            function, first, second = found
            begin = min(order[first], order[second])
            if any(begin < place < order[node] for place in written):
                continue  # what is written may be x
            _join(program, node, function, first, second)
            changed += 1
        return changed


def _match(node: fx.Node) -> tuple[int, fx.Node, fx.Node] | None:
    """The function and the two products of a gated layer that ends in `node`."""
    if node.target not in _TIMES or node.kwargs or len(node.args) != 2:
        return None
    for gate, up in (node.args, node.args[::-1]):
        if not isinstance(gate, fx.Node) or len(gate.users) != 1 or not _is_product(up):
            continue
        function = _function(gate)
        if function is None or not _is_product(gate.args[0]):
            continue
        first, second = gate.args[0], up
        assert isinstance(first, fx.Node)
        assert isinstance(second, fx.Node)
        x, *_, shape, digits = first.args
        other, *_, other_shape, other_digits = second.args
        if first is not second and x is other and digits == other_digits and not has_few_rows(x):
            return (function, first, second) if shape[0] == other_shape[0] else None  # type: ignore[index]
    return None


def _is_product(node: object) -> bool:
    """Whether a node is a product that nothing else reads."""
    if not isinstance(node, fx.Node) or node.target is not _LINEAR or len(node.users) != 1:
        return False
    return all(is_constant(part) for part in node.args[1:4])


def has_few_rows(node: Any) -> bool:
    """Whether a node is known to have so few rows that memory sets a product's pace."""
    value = node.meta.get("example_value")
    if not isinstance(value, torch.Tensor) or not all(map(is_number, value.shape)):
        return False
    return bool(math.prod(value.shape[:-1]) <= _FEW)


def _function(node: fx.Node) -> int | None:
    """The number of a node's function, None where the native code has none."""
    if node.target in (functional.silu, torch.ops.aten.silu.default):
        in_place = node.kwargs.get("inplace", False) or len(node.args) > 1
        return None if in_place else _SILU
    if node.target in (functional.gelu, torch.ops.aten.gelu.default):
        return _GELU_TANH if node.kwargs == {"approximate": "tanh"} else None
    return None


def _join(program: Program, node: fx.Node, function: int, first: fx.Node, second: fx.Node) -> None:
    gate = next(iter(first.users))
    parts = [*first.args[1:3], *second.args[1:3]]
    shapes = [*first.args[4], *second.args[4]]  # type: ignore[misc]
    call = (first.args[0], parts, [first.args[3], second.args[3]], shapes, function, first.args[5])
    with program.graph.inserting_before(node):
        joined = program.graph.call_function(torch.ops.qcompile_cpu.panel_gated.default, call)
    program.replace(node, joined)
    for gone in (gate, first, second):
        program.graph.erase_node(gone)
