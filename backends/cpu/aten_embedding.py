"""``cpu.aten_embedding``: rows of a weight that aten's int4 product reads too.

Comes in: ids of any shape. Goes out: rows in the wanted dtype, as the packed weight decodes.
Always holds: it reads what ``cpu.aten_linear`` reads, so that a tied embedding and head share one
packed copy. It asks more than decoding the checkpoint's own rows, which an embedding that shares
with nobody is therefore left to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from qcompile.backends.cpu.aten_int4 import NAME, ROWS, decode_rows
from qcompile.backends.cpu.aten_linear import judge
from qcompile.backends.cpu.panel import is_permuted
from qcompile.backends.cpu.probe import fallback_note
from qcompile.kernel import Accept, Reject, Tolerance
from qcompile.layout import QuantizedTensor
from qcompile.site import Site
from qcompile.target import Target

_SLOWNESS = 12.0  # the reference asks 10


@dataclass(frozen=True)
class AtenEmbedding:
    """See the module's text."""

    name: str = "cpu.aten_embedding"
    kind: str = "embedding"
    layout: str | None = NAME
    tolerance: Tolerance = Tolerance(2**-8, "scales and zeros are bfloat16")

    def accepts(self, site: Site, target: Target) -> Accept | Reject:
        """The same weights as the linear kernel, unless their columns are permuted."""
        if is_permuted(site.weight.spec):
            return Reject("rows come out with their columns permuted (act-order)")
        refused = judge(site, target)
        if refused is not None:
            return refused
        return Accept(_SLOWNESS * site.weight.nbytes, fallback_note("rows of what the head reads"))

    def emit(
        self, graph: fx.Graph, node: fx.Node, parts: Sequence[fx.Node], weight: QuantizedTensor
    ) -> fx.Node:
        """One call that decodes and casts."""
        return graph.call_function(
            torch.ops.qcompile_cpu.aten_embedding.default,
            (node.args[0], *parts, weight.shape[0], node.args[3]),
        )


_library = torch.library.Library("qcompile_cpu", "FRAGMENT")
_library.define(
    "aten_embedding(Tensor ids, Tensor codes, Tensor scale_zero, int n, ScalarType dtype)"
    " -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _embedding(
    ids: torch.Tensor, codes: torch.Tensor, scale_zero: torch.Tensor, n: int, dtype: torch.dtype
) -> torch.Tensor:
    flat, k = ids.reshape(-1).to(torch.int64), codes.shape[-1] * 2 // ROWS
    if flat.numel() and not (int(flat.min()) >= 0 and int(flat.max()) < n):
        raise IndexError(f"embedding: an id is outside 0..{n - 1}")
    return decode_rows(codes, scale_zero, k, flat).to(dtype).reshape(*ids.shape, k)


def _shape(
    ids: torch.Tensor, codes: torch.Tensor, scale_zero: torch.Tensor, n: int, dtype: torch.dtype
) -> torch.Tensor:
    return ids.new_empty((*ids.shape, codes.shape[-1] * 2 // ROWS), dtype=dtype)


_library.impl("aten_embedding", _embedding, "CompositeExplicitAutograd")
torch.library.register_fake("qcompile_cpu::aten_embedding", _shape, lib=_library)
