"""``cpu.aten_linear``: aten's own int4 product, for machines without a C++ compiler.

Comes in: bfloat16 activations of any leading shape. Goes out: ``x @ w.T + bias`` in bfloat16.
Always holds: activations are used as they are, sums are float32; the product of each plane and half
of the weight (see ``aten_int4``) is rounded to bfloat16, then their sum is.

Activations of another dtype, which a model may have between others, are multiplied with the decoded
weight, run by run: aten's product has no vectors for them and takes longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from qcompile.backends.cpu.aten_int4 import (
    NAME,
    ROWS,
    decode_blocks,
    halves_of,
    lanes,
    planes_of,
    unit_of,
)
from qcompile.backends.cpu.probe import fallback_note
from qcompile.kernel import Accept, Reject, Tolerance
from qcompile.layout import QuantizedTensor
from qcompile.site import Site
from qcompile.spec import AffineSpec
from qcompile.target import Target

_VECTORS = ("avx2", "avx512", "avx512_vnni", "amx")
# Times the bytes of the weight. More than the native kernels ask, less than decoding does.
_SLOWNESS = 4.0
_AT_ONCE = 1 << 20  # decoded weights at a time: they stay in the caches
# Rows of activations from which decoding the weight takes less time than so many products do
# (4096 x 4096, AVX-512): it is done once for all rows. One product is always faster.
_MANY_ROWS = {2: 512, 4: 48}


def judge(site: Site, target: Target) -> Reject | None:
    """What both kernels over this layout refuse."""
    if target.kind != "cpu":
        return Reject(f"runs on a CPU; the target is {target}")
    if target.arch not in _VECTORS:
        return Reject(f"aten's int4 product has vectors for AVX2 and AVX-512, not for {target}")
    spec, shape = site.weight.spec, site.weight.shape
    if len(shape) != 2 or not isinstance(spec, AffineSpec):
        return Reject(f"a weight of {len(shape)} dimensions, {spec}")
    if unit_of(spec.group, shape[1]) is None:
        return Reject(
            f"{shape[1]} columns in groups of {spec.group}; aten's int4 product takes whole groups"
            " of 16 or of multiples of 32"
        )
    return None


@dataclass(frozen=True)
class AtenLinear:
    """See the module's text."""

    name: str = "cpu.aten_linear"
    kind: str = "linear"
    layout: str | None = NAME
    tolerance: Tolerance = Tolerance(2**-8, "scales, zeros and the parts of a sum are bfloat16")

    def accepts(self, site: Site, target: Target) -> Accept | Reject:
        """Weights whose groups aten knows, on CPUs for which it has vectors."""
        refused = judge(site, target)
        if refused is not None:
            return refused
        spec = site.weight.spec
        assert isinstance(spec, AffineSpec)
        calls = planes_of(spec) * halves_of(spec.group)
        note = f"aten's int4 product{f', {calls} of them' if calls > 1 else ''}, over {spec}"
        return Accept(_SLOWNESS * site.weight.nbytes, fallback_note(note))

    def emit(
        self, graph: fx.Graph, node: fx.Node, parts: Sequence[fx.Node], weight: QuantizedTensor
    ) -> fx.Node:
        """One call for the product and the bias; before it a gather where columns are permuted."""
        bias = node.args[3] if len(node.args) > 3 else None
        x, (codes, scale_zero, *columns) = node.args[0], parts
        if columns:
            x = graph.call_function(torch.ops.aten.index_select.default, (x, -1, columns[0]))
        return graph.call_function(
            torch.ops.qcompile_cpu.aten_linear.default,
            (x, codes, scale_zero, bias, weight.shape[0]),
        )


# **** the op ****

_library = torch.library.Library("qcompile_cpu", "FRAGMENT")
_library.define(
    "aten_linear(Tensor x, Tensor codes, Tensor scale_zero, Tensor? bias, int n) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale_zero: torch.Tensor,
    bias: torch.Tensor | None,
    n: int,
) -> torch.Tensor:
    k = x.shape[-1]
    if codes.shape[-1] != ROWS * k // 2:
        raise RuntimeError(
            f"qcompile_cpu: aten_linear: x has {k} columns, w {codes.shape[-1] * 2 // ROWS}"
        )
    flat = x.reshape(-1, k)
    calls = len(codes) * scale_zero.shape[1]
    if x.dtype == torch.bfloat16 and len(flat) < _MANY_ROWS.get(calls, len(flat) + 1):
        out = _product(flat.contiguous(), codes, scale_zero)
    else:
        out = _decoded(flat.float(), codes, scale_zero)
    out = out[:, :n]
    if bias is not None:
        out = out + bias.float()
    return out.to(x.dtype).contiguous().view(*x.shape[:-1], n)


def _product(x: torch.Tensor, codes: torch.Tensor, scale_zero: torch.Tensor) -> torch.Tensor:
    """``[M, N']`` with N filled up to whole blocks; bfloat16 where one product is all."""
    k, halves, units = x.shape[1], *scale_zero.shape[1:3]
    total: torch.Tensor | None = None
    for half in range(halves):
        own = x if halves == 1 else _half(x, half)
        for plane, both in zip(codes, scale_zero[:, half], strict=True):
            product = torch.ops.aten._weight_int4pack_mm_for_cpu(
                own, plane.view(-1, k // 2), k // units, both.view(units, -1, 2)
            )
            total = product if total is None else total.float().add_(product)
    assert total is not None
    return total


def _half(x: torch.Tensor, half: int) -> torch.Tensor:
    """The activations of the first or the second 16 columns of each 32, zeros for the others."""
    own = torch.zeros_like(x)
    place = (len(x), x.shape[1] // 32, 2, 16)
    own.view(place)[:, :, half] = x.view(place)[:, :, half]
    return own


def _decoded(x: torch.Tensor, codes: torch.Tensor, scale_zero: torch.Tensor) -> torch.Tensor:
    """``[M, N']`` from float32 activations, and from weights decoded a few blocks at a time."""
    k, rows = x.shape[1], lanes().rows
    blocks = codes.shape[1] * ROWS // rows
    step = min(blocks, max(1, _AT_ONCE // (k * rows)))
    tiles = torch.empty(len(codes), step, k, rows)
    out = x.new_empty(len(x), blocks, rows)
    for start in range(0, blocks, step):
        run = slice(start, min(start + step, blocks))
        room = tiles[:, : run.stop - start]
        decode_blocks(codes, scale_zero, run, room)
        whole = room[0] if len(room) == 1 else room[0].add_(room[1])
        out[:, run] = torch.matmul(x, whole).transpose(0, 1)
    order = lanes().order
    return (out if order is None else out[:, :, order]).flatten(1)


def _shape(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale_zero: torch.Tensor,
    bias: torch.Tensor | None,
    n: int,
) -> torch.Tensor:
    k = codes.shape[-1] * 2 // ROWS
    torch._check(x.shape[-1] == k, lambda: f"aten_linear: x has {x.shape[-1]} columns, w {k}")
    return x.new_empty((*x.shape[:-1], n))


_library.impl("aten_linear", _linear, "CompositeExplicitAutograd")
torch.library.register_fake("qcompile_cpu::aten_linear", _shape, lib=_library)
