"""The canonical ops as kernels: right, slow, for any layout.

Comes in: any site on a CPU. Goes out: the canonical op itself.
Always holds: it takes a weight as the checkpoint has it, so it needs no edge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from qcompile.kernel import Accept, Reject, Tolerance
from qcompile.layout import QuantizedTensor
from qcompile.ops import encode_meaning
from qcompile.site import Site
from qcompile.target import Target

# Decoding in torch takes up to some hundred times as long as reading the packed bytes; of an
# embedding only the rows that are looked up are decoded.
_SLOWNESS = {"linear": 100.0, "embedding": 10.0, "experts": 100.0}


@dataclass(frozen=True)
class ReferenceKernel:
    """A canonical op, executed by its reference implementation."""

    name: str
    kind: str
    layout: str | None = None
    tolerance: Tolerance = Tolerance(1e-6, "the order of float32 sums")

    def accepts(self, site: Site, target: Target) -> Accept | Reject:
        """Every site on a CPU, at a price."""
        if target.kind != "cpu":
            return Reject(f"decodes on the CPU; the target is {target}")
        cost = _SLOWNESS[self.kind] * site.weight.nbytes
        return Accept(cost, "decodes rows to float32 at every call")

    def emit(
        self, graph: fx.Graph, node: fx.Node, parts: Sequence[fx.Node], weight: QuantizedTensor
    ) -> fx.Node:
        """The canonical op on the packed parts."""
        return canonical(graph, node, parts, weight)


def canonical(
    graph: fx.Graph, node: fx.Node, parts: Sequence[fx.Node], weight: QuantizedTensor
) -> fx.Node:
    """The op of ``node`` on a weight's parts in whatever layout; the arguments are ``emit``'s."""
    first, _, _, *rest = node.args
    assert callable(node.target)
    arguments = (first, list(parts), encode_meaning(weight), *rest)
    return graph.call_function(node.target, arguments)


KERNELS = (
    ReferenceKernel("reference.linear", "linear"),
    ReferenceKernel("reference.embedding", "embedding"),
    ReferenceKernel("reference.experts", "experts"),
)
