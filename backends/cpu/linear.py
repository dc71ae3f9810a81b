"""``cpu.panel_linear``: activations as whole numbers times packed panels.

Comes in: activations of any leading shape. Goes out: ``x @ w.T + bias`` in the activation's dtype.
Always holds: weights are decoded in registers or in a tile that stays in the first-level cache; the
numerics are *exact* (activations keep 23 bits of the largest in their group, 15 where they are
bfloat16, sums of a group are exact, one rounding at the end) or *fast* (7 bits, one less where a
group is smaller than others of its 256 columns: steps of a chunk differ by powers of two).
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
from qcompile.spec import ScaledSpec
from qcompile.target import Target


def judge(site: Site, target: Target, digits: int = 0) -> Accept | Reject:
    """What every kernel over panels answers."""
    if target.kind != "cpu":
        return Reject(f"runs on a CPU; the target is {target}")
    weight = site.weight
    if len(weight.shape) != 2:
        return Reject(f"a weight of {len(weight.shape)} dimensions; panels hold matrices")
    reason = unfit(weight.spec) or missing_compiler()
    if reason:
        return Reject(reason)
    if digits == 1 and isinstance(weight.spec, ScaledSpec):
        return Reject("narrow floats are multiplied with activations as they are")
    note = str(weight.spec)
    if weight.activations is not None:
        note += f"; activations stay floats, where the checkpoint allows {weight.activations}"
    return panel_cost(site, digits, note)


def panel_cost(site: Site, digits: int, note: str) -> Accept:
    """The offer of a kernel over panels: it reads every byte of the weight once."""
    if digits == 1:
        # The same bytes and fewer products: to be preferred where it may be used at all.
        return Accept(0.9 * site.weight.nbytes, f"fast: activations rounded to int8, over {note}")
    return Accept(float(site.weight.nbytes), f"exact: activations as they are, over {note}")


@dataclass(frozen=True)
class PanelLinear:
    """See the module's text.

    Attributes:
        digits: signed bytes of an activation; 0 lets its dtype decide.
    """

    name: str = "cpu.panel_linear"
    kind: str = "linear"
    layout: str | None = NAME
    digits: int = 0
    tolerance: Tolerance = Tolerance(
        1e-6, "activations keep 23 bits of the largest in their group; groups are added in float32"
    )

    def accepts(self, site: Site, target: Target) -> Accept | Reject:
        """Affine and lookup weights whose groups have one size."""
        return judge(site, target, self.digits)

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
            (x, blob, table, bias, arguments(weight.spec, weight.shape), self.digits),
        )


EXACT = PanelLinear()
FAST = PanelLinear(
    name="cpu.panel_linear_int8",
    digits=1,
    tolerance=Tolerance(2e-2, "activations are rounded to 8 bits by groups"),
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
