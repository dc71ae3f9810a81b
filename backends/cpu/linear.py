"""``cpu.panel_linear``: float32 sums over packed panels.

Comes in: activations of any leading shape. Goes out: ``x @ w.T + bias`` in the activation's dtype.
Always holds: weights are decoded in registers or in a tile that stays in the first-level cache; the
numerics are *exact*: float activations, float32 accumulation, one rounding at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from qcompile.backends.cpu.panel import NAME, arguments, unfit
from qcompile.backends.cpu.probe import missing_compiler
from qcompile.kernel import Accept, Reject, Tolerance
from qcompile.layout import QuantizedTensor
from qcompile.site import Site
from qcompile.target import Target


def judge(site: Site, target: Target) -> Accept | Reject:
    """What every kernel over panels answers."""
    if target.kind != "cpu":
        return Reject(f"runs on a CPU; the target is {target}")
    weight = site.weight
    if len(weight.shape) != 2:
        return Reject(f"a weight of {len(weight.shape)} dimensions; panels hold matrices")
    reason = unfit(weight.spec) or missing_compiler()
    if reason:
        return Reject(reason)
    note = f"exact: float32 sums over {weight.spec}"
    if weight.activations is not None:
        note += f"; activations stay floats, where the checkpoint allows {weight.activations}"
    return Accept(float(weight.nbytes), note)


@dataclass(frozen=True)
class PanelLinear:
    """See the module's text."""

    name: str = "cpu.panel_linear"
    kind: str = "linear"
    layout: str | None = NAME
    tolerance: Tolerance = Tolerance(
        1e-6, "activations keep 23 bits of the largest in their group; groups are added in float32"
    )

    def accepts(self, site: Site, target: Target) -> Accept | Reject:
        """Affine and lookup weights whose groups have one size."""
        return judge(site, target)

    def emit(
        self, graph: fx.Graph, node: fx.Node, parts: Sequence[fx.Node], weight: QuantizedTensor
    ) -> fx.Node:
        """One call for the product and the bias; before it a gather where columns are permuted."""
        bias = node.args[3] if len(node.args) > 3 else None
        x, (blob, table, *columns) = node.args[0], parts
        if columns:
            x = graph.call_function(torch.ops.aten.index_select.default, (x, -1, columns[0]))
        return graph.call_function(
            torch.ops.qcompile_cpu.panel_linear.default,
            (x, blob, table, bias, arguments(weight.spec, weight.shape), 0),
        )


@torch.library.register_fake("qcompile_cpu::panel_linear")
def _shape(
    x: torch.Tensor,
    blob: torch.Tensor,
    table: torch.Tensor,
    bias: torch.Tensor | None,
    shape: list[int],
    digits: int,
) -> torch.Tensor:
    n, k = shape[:2]
    torch._check(x.shape[-1] == k, lambda: f"panel_linear: x has {x.shape[-1]} columns, w {k}")
    return x.new_empty((*x.shape[:-1], n))
