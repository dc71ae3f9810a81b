"""Every spelling of a linear with a named weight becomes ``aten.linear(x, w, bias)``.

Before: ``F.linear(x, w, bias=b)``, ``addmm(b, x, w.t())``, ``mm(x, w.t())``, ``matmul(x, w.T)``,
``x @ w.transpose(0, 1)`` and their ATen forms. After: ``aten.linear.default(x, w, b)``; a transpose
that nothing else uses is gone.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch.fx.node import Argument

from qcompile.program import Program

aten = torch.ops.aten
LINEAR = aten.linear.default

_LINEARS = (torch.nn.functional.linear, torch._C._nn.linear, aten.linear.default)
_PRODUCTS = (
    torch.matmul,
    torch.mm,
    operator.matmul,
    aten.mm.default,
    aten.matmul.default,
)
_ADDED_PRODUCTS = (torch.addmm, aten.addmm.default)


@dataclass(frozen=True)
class CanonicalizeLinear:
    """See the module's text."""

    name: str = "canonicalize.linear"

    def run(self, program: Program) -> int:
        """Rewrite the program; the number of nodes that changed."""
        return sum(_rewrite(program, node) for node in list(program.graph.nodes))


def _rewrite(program: Program, node: fx.Node) -> bool:
    found = match_linear(program, node)
    if found is None or node.target is LINEAR:
        return False
    with program.graph.inserting_before(node):
        new = program.graph.call_function(LINEAR, found)
    operands = [operand for operand in node.all_input_nodes if operand not in found]
    program.replace(node, new)
    for operand in operands:
        # A transpose left behind would look like a use of the weight that is no linear.
        if not operand.users:
            program.graph.erase_node(operand)
    return True


def match_linear(program: Program, node: fx.Node) -> tuple[fx.Node, fx.Node, Argument] | None:
    """``(x, weight, bias)`` when the node is a linear of a named weight, else None."""
    if node.target in ("matmul", "mm") and node.op == "call_method":
        return _product(program, node.args)
    if node.op != "call_function":
        return None
    if node.target in _LINEARS:
        return _plain(program, node)
    if node.target in _PRODUCTS and not node.kwargs:
        return _product(program, node.args)
    if node.target in _ADDED_PRODUCTS and not node.kwargs and len(node.args) == 3:
        found = _product(program, node.args[1:])
        bias = node.args[0]
        return None if found is None or _dimensions(bias) != 1 else (found[0], found[1], bias)
    return None


def _plain(program: Program, node: fx.Node) -> tuple[fx.Node, fx.Node, Argument] | None:
    given = dict(zip(("input", "weight", "bias"), node.args, strict=False)) | node.kwargs
    x, weight = given.get("input"), given.get("weight")
    if not isinstance(x, fx.Node) or weight not in program.weights:
        return None
    assert isinstance(weight, fx.Node)
    return x, weight, given.get("bias")


def _product(program: Program, args: Sequence[object]) -> tuple[fx.Node, fx.Node, None] | None:
    if len(args) != 2 or not isinstance(args[0], fx.Node) or not isinstance(args[1], fx.Node):
        return None
    weight = transposed_weight(program, args[1])
    return None if weight is None else (args[0], weight, None)


def transposed_weight(program: Program, node: fx.Node) -> fx.Node | None:
    """The weight node that ``node`` is the transpose of, or None."""
    source = node.args[0] if node.args else None
    if source not in program.weights or not isinstance(source, fx.Node):
        return None
    name, rest = node.target, tuple(node.args[1:])
    if name in ("t", torch.t, aten.t.default) and not rest:
        return source
    if name is getattr and rest == ("T",):
        return source
    if name is aten.numpy_T.default and _dimensions(source) == 2:
        return source
    swaps = ("transpose", torch.transpose, aten.transpose.int, "swapaxes", torch.swapaxes)
    if name in swaps and set(_axes(rest)) == {0, 1}:
        return source
    permutes = ("permute", torch.permute, aten.permute.default)
    if name in permutes and _axes(rest) == (1, 0):
        return source
    return None


def _axes(args: tuple[object, ...]) -> tuple[int, ...]:
    flat = args[0] if len(args) == 1 and isinstance(args[0], Sequence) else args
    return tuple(axis % 2 for axis in flat if isinstance(axis, int))


def _dimensions(node: object) -> int | None:
    value = node.meta.get("example_value", node.meta.get("val")) if isinstance(node, fx.Node) else 0
    return value.dim() if isinstance(value, torch.Tensor) else None
