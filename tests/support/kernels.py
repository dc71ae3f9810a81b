"""Kernels whose verdicts and results a test chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from qcompile.kernel import Accept, Reject, Tolerance
from qcompile.layout import QuantizedTensor
from qcompile.ops import encode_meaning
from qcompile.site import Site
from qcompile.target import Target


@dataclass(frozen=True)
class FakeKernel:
    """A canonical op that costs ``cost`` and multiplies what it computes by ``factor``.

    Attributes:
        refuse: the reason to refuse a site, or an empty string.
        seen: the sites it was asked about.
    """

    name: str
    kind: str = "linear"
    layout: str | None = None
    cost: float = 1.0
    refuse: Callable[[Site], str] = lambda site: ""
    factor: float = 1.0
    tolerance: Tolerance = Tolerance(1e-5, "the order of sums")
    seen: list[Site] = field(default_factory=list)

    def accepts(self, site: Site, target: Target) -> Accept | Reject:
        self.seen.append(site)
        reason = self.refuse(site)
        return Reject(reason) if reason else Accept(self.cost, f"as {self.layout}")

    def emit(
        self, graph: fx.Graph, node: fx.Node, parts: Sequence[fx.Node], weight: QuantizedTensor
    ) -> fx.Node:
        first, _, _, *rest = node.args
        assert callable(node.target)
        out = graph.call_function(node.target, (first, list(parts), encode_meaning(weight), *rest))
        return graph.call_function(torch.mul, (out, self.factor))
