"""``cpu.decoded_linear`` and ``cpu.decoded_embedding``: the canonical ops over ``cpu.fields``.

Comes in: activations or ids of any shape. Goes out: what the canonical op says, bit for bit.
Always holds: rows are decoded a few at a time, so that they stay in the caches; nothing is rounded
that the reference does not round. A few times as fast as decoding what a checkpoint stores: what
torch on its own can do for activations that aten's int4 product has no vectors for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from qcompile.backends.cpu.fields import NAME
from qcompile.backends.cpu.probe import find_compiler
from qcompile.backends.reference import canonical
from qcompile.kernel import Accept, Reject, Tolerance
from qcompile.layout import QuantizedTensor
from qcompile.site import Site
from qcompile.spec import AffineSpec
from qcompile.target import Target


@dataclass(frozen=True)
class DecodedKernel:
    """See the module's text.

    Attributes:
        slowness: the cost of a byte of the weight.
        note: for the plan.
    """

    name: str
    kind: str
    slowness: float
    note: str
    layout: str | None = NAME
    tolerance: Tolerance = Tolerance(2e-6, "the order of float32 sums")

    def accepts(self, site: Site, target: Target) -> Accept | Reject:
        """Every weight that the layout holds."""
        if target.kind != "cpu":
            return Reject(f"decodes on the CPU; the target is {target}")
        if len(site.weight.shape) != 2:
            return Reject(f"a weight of {len(site.weight.shape)} dimensions; fields hold matrices")
        why = "" if find_compiler() else "no C++ compiler was found: "
        return Accept(self.slowness * site.weight.nbytes, why + self.note)

    def emit(
        self, graph: fx.Graph, node: fx.Node, parts: Sequence[fx.Node], weight: QuantizedTensor
    ) -> fx.Node:
        """The canonical op on the packed parts; for a product, on activations in their order."""
        spec = weight.spec
        if self.kind != "linear" or not (isinstance(spec, AffineSpec) and spec.order == "permuted"):
            return canonical(graph, node, parts, weight)
        *parts, columns = parts
        gather = torch.ops.aten.index_select.default
        x = graph.call_function(gather, (node.args[0], -1, columns))
        in_order = replace(weight, spec=replace(spec, order="sequential"))
        made = canonical(graph, node, parts, in_order)
        made.update_arg(0, x)
        return made


# The reference asks 100 and 10 of what is stored. Rows that are looked up take as long in either:
# an embedding is packed only where a head shares the weight.
KERNELS = (
    DecodedKernel(
        "cpu.decoded_linear", "linear", 12.0, "decodes rows to float32 at every call, in torch"
    ),
    DecodedKernel("cpu.decoded_embedding", "embedding", 12.0, "rows of what the head reads"),
)
