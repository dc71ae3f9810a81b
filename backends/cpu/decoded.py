"""``cpu.decoded_linear`` and ``cpu.decoded_embedding``: what torch itself decodes, at every call.

Comes in: activations or ids of any shape. Goes out: what the canonical op says.
Always holds: rows are decoded a few at a time, so that they stay in the caches, to the very values
of the reference; nothing is rounded that it does not round. A few times as fast as decoding what a
checkpoint stores: for activations that aten's int4 product has no vectors for.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx
from torch.nn import functional

from qcompile.backends.cpu.fields import NAME, decode_into, room_for
from qcompile.backends.cpu.probe import fallback_note
from qcompile.backends.reference import canonical
from qcompile.kernel import Accept, Reject, Tolerance
from qcompile.layout import QuantizedTensor
from qcompile.ops import decode_meaning, encode_meaning, weight_of
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
        return Accept(self.slowness * site.weight.nbytes, fallback_note(self.note))

    def emit(
        self, graph: fx.Graph, node: fx.Node, parts: Sequence[fx.Node], weight: QuantizedTensor
    ) -> fx.Node:
        """One call; before a product a gather where columns are permuted."""
        if self.kind == "embedding":
            return canonical(graph, node, parts, weight)
        x, bias, spec = node.args[0], node.args[3] if len(node.args) > 3 else None, weight.spec
        if isinstance(spec, AffineSpec) and spec.order == "permuted":
            *parts, columns = parts
            x = graph.call_function(torch.ops.aten.index_select.default, (x, -1, columns))
            weight = replace(weight, spec=replace(spec, order="sequential"))
        return graph.call_function(
            torch.ops.qcompile_cpu.decoded_linear.default,
            (x, list(parts), encode_meaning(weight), bias),
        )


# The reference asks 100 and 10 of what is stored. Rows that are looked up take as long in either:
# an embedding is packed only where a head shares the weight.
KERNELS = (
    DecodedKernel(
        "cpu.decoded_linear", "linear", 12.0, "decodes rows to float32 at every call, in torch"
    ),
    DecodedKernel("cpu.decoded_embedding", "embedding", 12.0, "rows of what the head reads"),
)


# **** the op ****

_AT_ONCE = 1 << 20  # decoded weights of a run: 4 MB of floats
_library = torch.library.Library("qcompile_cpu", "FRAGMENT")
_library.define(
    "decoded_linear(Tensor x, Tensor[] parts, str meaning, Tensor? bias) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


class _Kept(threading.local):
    """Room that a thread keeps: new memory for every product costs more than decoding into it."""

    floats = torch.empty(0, device="cpu")
    codes = torch.empty(0, dtype=torch.uint8, device="cpu")


_KEPT = _Kept()


def _rooms(rows: int, floats: int, codes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 ``[rows, floats]`` and uint8 ``[rows, codes]``, of whatever values."""
    with torch.inference_mode(False):  # what is made inside may not be written to outside
        if _KEPT.floats.numel() < rows * floats:
            _KEPT.floats = torch.empty(rows * floats, device="cpu")
        if _KEPT.codes.numel() < rows * codes:
            _KEPT.codes = torch.empty(rows * codes, dtype=torch.uint8, device="cpu")
    room = _KEPT.floats[: rows * floats].view(rows, floats)
    return room, _KEPT.codes[: rows * codes].view(rows, codes)


def _linear(
    x: torch.Tensor, parts: list[torch.Tensor], meaning: str, bias: torch.Tensor | None
) -> torch.Tensor:
    weight = weight_of(parts, meaning)
    n, k = weight.shape
    if x.shape[-1] != k:
        raise RuntimeError(f"qcompile_cpu: decoded_linear: x has {x.shape[-1]} columns, w {k}")
    wide = x.reshape(-1, k).float()
    step = min(n, max(1, _AT_ONCE // max(1, k)))
    room, scratch = _rooms(step, *room_for(weight))
    out = wide.new_empty(len(wide), n)
    for start in range(0, n, step):
        run = slice(start, min(start + step, n))
        rows = run.stop - start
        decode_into(weight.take_rows(run), room[:rows], scratch[:rows])
        out[:, run] = functional.linear(wide, room[:rows, :k])
    if bias is not None:
        out += bias
    return out.to(x.dtype).view(*x.shape[:-1], n)


def _shape(
    x: torch.Tensor, parts: list[torch.Tensor], meaning: str, bias: torch.Tensor | None
) -> torch.Tensor:
    _, _, (n, k) = decode_meaning(meaning)
    torch._check(x.shape[-1] == k, lambda: f"decoded_linear: x has {x.shape[-1]} columns, w {k}")
    return x.new_empty((*x.shape[:-1], n))


_library.impl("decoded_linear", _linear, "CompositeExplicitAutograd")
torch.library.register_fake("qcompile_cpu::decoded_linear", _shape, lib=_library)
