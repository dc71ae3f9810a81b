"""Products that read the same activations become one call.

Before: ``panel_linear(x, a, ...)``, ``panel_linear(x, b, ...)``. After: ``panel_linears(x, [a, b],
...)``, which turns the activations into digits once and wakes the threads once, whatever the types
of the weights are. Always holds: products keep their numerics; one whose bias is computed in the
graph stays alone, and so do those between which the graph writes to a tensor: that may be x.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx

from qcompile.program import Program
from qcompile.writes import may_write

_ONE = torch.ops.qcompile_cpu.panel_linear
_SEVERAL = torch.ops.qcompile_cpu.panel_linears


@dataclass(frozen=True)
class JoinSiblings:
    """See the module's text."""

    name: str = "cpu.siblings"

    def run(self, program: Program) -> int:
        """Join what can be joined; the number of products that were."""
        families: dict[tuple[object, ...], list[fx.Node]] = {}
        writes = 0
        for node in program.graph.nodes:
            writes += may_write(node)
            if node.target is not _ONE.default:
                continue
            x, *_, digits = node.args
            if all(is_constant(part) for part in node.args[1:4]):
                families.setdefault((x, digits, writes), []).append(node)
        joined = [family for family in families.values() if len(family) > 1]
        for family in joined:
            _join(program, family)
        return sum(map(len, joined))


def is_constant(part: object) -> bool:
    """Whether a part can be read anywhere in the graph."""
    return part is None or (isinstance(part, fx.Node) and part.op in ("get_attr", "placeholder"))


def _join(program: Program, family: list[fx.Node]) -> None:
    first = family[0]
    constants = [part for node in family for part in node.args[1:4] if isinstance(part, fx.Node)]
    for part in constants:
        if part.op == "get_attr":
            first.prepend(part)
    parts = [part for node in family for part in node.args[1:3]]
    biases = [node.args[3] for node in family]
    shapes = [number for node in family for number in node.args[4]]  # type: ignore[union-attr]
    with program.graph.inserting_before(first):
        call = (first.args[0], parts, biases, shapes, first.args[5])
        several = program.graph.call_function(_SEVERAL.default, call)
        results = [
            program.graph.call_function(operator.getitem, (several, index))
            for index in range(len(family))
        ]
    for node, result in zip(family, results, strict=True):
        program.replace(node, result)


@torch.library.register_fake("qcompile_cpu::panel_linears")
def _shapes(
    x: torch.Tensor,
    parts: list[torch.Tensor],
    biases: list[torch.Tensor | None],
    shapes: list[int],
    digits: int,
) -> list[torch.Tensor]:
    return [x.new_empty((*x.shape[:-1], n)) for n in shapes[::6]]
