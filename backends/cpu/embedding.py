"""``cpu.panel_embedding``: decode the looked-up rows of packed panels, and no others.

Comes in: ids of any shape. Goes out: rows in the wanted dtype, bit-equal to the decoded weight
rounded once. Always holds: it reads the same panels as ``cpu.panel_linear``, so a tied embedding
and head share one packed copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from qcompile.backends.cpu.linear import judge
from qcompile.backends.cpu.panel import NAME, arguments, is_permuted
from qcompile.kernel import Accept, Reject, Tolerance
from qcompile.layout import QuantizedTensor
from qcompile.site import Site
from qcompile.target import Target


@dataclass(frozen=True)
class PanelEmbedding:
    """See the module's text."""

    name: str = "cpu.panel_embedding"
    kind: str = "embedding"
    layout: str | None = NAME
    tolerance: Tolerance = Tolerance(0.0, "rows are decoded as the spec defines them")

    def accepts(self, site: Site, target: Target) -> Accept | Reject:
        """The same weights as the linear kernel, unless their columns are permuted."""
        if is_permuted(site.weight.spec):
            return Reject("rows come out with their columns permuted (act-order)")
        return judge(site, target)

    def emit(
        self, graph: fx.Graph, node: fx.Node, parts: Sequence[fx.Node], weight: QuantizedTensor
    ) -> fx.Node:
        """One call that decodes and casts."""
        return graph.call_function(
            torch.ops.qcompile_cpu.panel_embedding.default,
            (node.args[0], *parts, arguments(weight.spec, weight.shape), node.args[3]),
        )


@torch.library.register_fake("qcompile_cpu::panel_embedding")
def _shape(
    ids: torch.Tensor, blob: torch.Tensor, table: torch.Tensor, shape: list[int], dtype: torch.dtype
) -> torch.Tensor:
    return ids.new_empty((*ids.shape, shape[1]), dtype=dtype)
