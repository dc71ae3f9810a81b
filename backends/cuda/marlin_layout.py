"""The layouts that Marlin kernels read.

Comes in: a spec and a shape ``[N, K]``. Goes out: operands as the matrix unit takes them.
Always holds: N and K are padded with zeros to whole tiles, codes below 4 bits are stored in 4,
those below 8 in 8; symmetric codes are moved so that their middle is that of the stored width.

``cuda.marlin4.DTYPE``, ``cuda.marlin8.DTYPE``
    ``weight`` int32 ``[K / 16, N / T, T B / 2]`` for B bits, T the ``tile`` of K: 64 or 128.
    ``scale`` ``[G, N / T, T]`` in DTYPE.
    ``zero`` int32 ``[G, N / T, T B / 32]`` where the spec has zero points.
    ``columns`` int32 ``[K]`` where it is *permuted*: place i holds column ``columns[i]``, so that
    groups run in order; kernels gather the input. This K is the weight's own.

A word of ``weight`` holds codes of one lane of a warp for ``mma.m16n8k16``, whose second operand
gives lane L the rows ``2 (L % 4) + 8 a + b`` and the column ``L / 4``, a and b in 0, 1. A tile of
16 rows (K) and 64 columns (N) is four column blocks w of two halves h:

===== ==================================== ============================
bits  word within the tile                 place of a code in the word
===== ==================================== ============================
4     ``4 L + w``                          ``4 b + 2 h + a``
8     ``8 L + 2 w + h``                    ``2 b + a``
===== ==================================== ============================

Scales of groups lie transposed in blocks of 8 by 8 columns, those of whole rows (G of 1) and
biases in blocks of 4 by 4 pairs; zero points lie as scales of groups do, packed with the even
places of a word first. All of it agrees, bit for bit, with what the repacking kernels of vLLM
write.

A tile of 16 by 64 that holds one 5, at row (K) 9 and column (N) 1: lane 4, a and b are 1.

>>> codes = torch.zeros(64, 16, dtype=torch.uint8)
>>> codes[1, 9] = 5
>>> words = pack_codes(codes, 4).flatten()
>>> [(int(i), hex(int(words[i]))) for i in words.nonzero()]
[(16, '0x500000')]
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from qcompile.backends.cuda.schemas import HALVES
from qcompile.backends.rules import name_of
from qcompile.errors import LayoutError
from qcompile.layout import Field, Layout, QuantizedTensor, Shape, register_layout
from qcompile.spec import AffineSpec, Spec

_NARROW, _WIDE = 64, 128  # tiles of the kernels along N; along K the other one


@dataclass(frozen=True)
class Order:
    """One layout.

    Attributes:
        bits: of a stored code: 4 or 8.
        dtype: of scales and of the activations.
    """

    bits: int
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """The layout's name."""
        return f"cuda.marlin{self.bits}.{name_of(self.dtype)}"


ORDERS = tuple(Order(bits, dtype) for bits in (4, 8) for dtype in HALVES)
ORDER_OF = {order.name: order for order in ORDERS}


def unfit(spec: Spec, bits: int) -> str | None:
    """Why codes of a spec cannot be stored with this many bits, or None when they can."""
    if not isinstance(spec, AffineSpec):
        return f"spec {spec} is not affine"
    if spec.form == "offset":
        return "float offsets; Marlin takes integer zero points"
    if spec.order == "indexed":
        return "groups of one size are needed; this weight's group index makes them uneven"
    return None if spec.bits <= bits else f"codes of {spec.bits} bits in {bits}"


def is_permuted(spec: Spec) -> bool:
    """Whether columns are stored in an order of their own."""
    return isinstance(spec, AffineSpec) and spec.order == "permuted"


def moved_by(spec: AffineSpec, bits: int) -> int:
    """What is added to codes: symmetric ones get the middle of the stored width."""
    return (1 << (bits - 1)) - (1 << (spec.bits - 1)) if spec.form == "symmetric" else 0


@dataclass(frozen=True)
class Padded:
    """Sizes as they are stored.

    Attributes:
        columns: K.
        group: columns that share a scale; K where a row does.
        tile: N is a multiple of it.
    """

    columns: int
    group: int
    tile: int

    @property
    def groups(self) -> int:
        """Scales of a row."""
        return self.columns // self.group

    def rows(self, n: int) -> int:
        """N as it is stored."""
        return -(-n // self.tile) * self.tile


def padded(spec: AffineSpec, columns: int) -> Padded:
    """The sizes of a weight of K columns.

    A kernel needs K to be a multiple of 128 with N one of 64, or the other way round. It finds the
    group by dividing K by the number of scales, so that K is whole groups.
    """
    grouped = spec.group < columns
    step = math.lcm(spec.group, _NARROW) if grouped else _NARROW
    wide = -(-columns // step) * step
    tile = _NARROW if wide % _WIDE == 0 else _WIDE
    return Padded(wide, spec.group if grouped else wide, tile)


# **** codes ****


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Words int32 ``[K / 16, N / 64, 32 B]`` of codes uint8 ``[N, K]``."""
    n, k = codes.shape
    # N: tile, w, h, L / 4;  K: tile, a, L % 4, b.
    split = codes.reshape(n // 64, 4, 2, 8, k // 16, 2, 4, 2)
    if bits == 4:
        lanes = split.permute(4, 0, 3, 6, 1, 7, 2, 5).reshape(k // 16, n // 64, -1, 2)
        held = lanes[..., 0] | lanes[..., 1] << 4
    else:
        held = split.permute(4, 0, 3, 6, 1, 2, 7, 5).reshape(k // 16, n // 64, -1)
    return held.contiguous().view(torch.int32)


def unpack_codes(words: torch.Tensor, bits: int, n: int, k: int) -> torch.Tensor:
    """The inverse: codes uint8 ``[N, K]``."""
    held = words.contiguous().view(torch.uint8)
    if bits == 4:
        held = torch.stack((held & 15, held >> 4), dim=-1)
        split = held.reshape(k // 16, n // 64, 8, 4, 4, 2, 2, 2).permute(1, 4, 6, 2, 0, 7, 3, 5)
    else:
        split = held.reshape(k // 16, n // 64, 8, 4, 4, 2, 2, 2).permute(1, 4, 5, 2, 0, 7, 3, 6)
    return split.reshape(n, k)


# **** scales, zero points, biases ****


def by_groups(values: torch.Tensor) -> torch.Tensor:
    """Columns ``[..., N]`` as scales of groups lie; its own inverse."""
    return _turned(values, (8, 8))


def by_rows(values: torch.Tensor) -> torch.Tensor:
    """Columns ``[..., N]`` as scales of whole rows and biases lie; its own inverse."""
    return _turned(values, (4, 4, 2))


def _turned(values: torch.Tensor, block: tuple[int, ...]) -> torch.Tensor:
    split = values.reshape(*values.shape[:-1], -1, *block)
    first = values.dim()
    return split.transpose(first, first + 1).reshape(values.shape)


def pack_zeros(zeros: torch.Tensor, bits: int) -> torch.Tensor:
    """Words int32 ``[G, N B / 32]`` of zero points uint8 ``[G, N]``."""
    places = _turned(by_groups(zeros), (16 // bits, 2))
    if bits == 4:
        pairs = places.reshape(*zeros.shape[:-1], -1, 2)
        places = pairs[..., 0] | pairs[..., 1] << 4
    return places.contiguous().view(torch.int32)


def unpack_zeros(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse: zero points uint8 ``[G, N]``."""
    held = words.contiguous().view(torch.uint8)
    if bits == 4:
        held = torch.stack((held & 15, held >> 4), dim=-1).flatten(-2)
    return by_groups(_turned(held, (2, 16 // bits)))


# **** the layouts ****


def _fields(order: Order, spec: Spec, shape: Shape) -> tuple[Field, ...]:
    reason = unfit(spec, order.bits)
    if reason is not None:
        raise LayoutError(f"layout {order.name}", reason, "a spec that fits", "choose another")
    assert isinstance(spec, AffineSpec)
    n, k = shape
    size = padded(spec, k)
    tile, tiles = size.tile, size.rows(n) // size.tile

    def field(name: str, dtype: torch.dtype, lines: int, entries: int) -> Field:
        return Field(name, dtype, (lines, tiles, entries), rows=tile, axis=1)

    fields = [
        field("weight", torch.int32, size.columns // 16, tile * order.bits // 2),
        field("scale", order.dtype, size.groups, tile),
    ]
    if spec.form == "zero":
        fields.append(field("zero", torch.int32, size.groups, tile * order.bits // 32))
    if is_permuted(spec):
        fields.append(Field("columns", torch.int32, (k,), rows=0))
    return tuple(fields)


def _decode(order: Order, weight: QuantizedTensor) -> torch.Tensor:
    spec = weight.spec
    assert isinstance(spec, AffineSpec)
    n, k = weight.shape
    size = padded(spec, k)
    codes = unpack_codes(weight.parts["weight"].flatten(1), order.bits, size.rows(n), size.columns)
    scale = weight.parts["scale"].flatten(1)
    scale = by_groups(scale) if size.groups > 1 else by_rows(scale)
    middle: torch.Tensor | float = 2.0 ** (order.bits - 1)
    if spec.form == "zero":
        zeros = unpack_zeros(weight.parts["zero"].flatten(1), order.bits)
        middle = zeros.t().float().repeat_interleave(size.group, dim=1)
    wide = scale.t().float().repeat_interleave(size.group, dim=1)
    values = (wide * (codes.float() - middle))[:n, :k]
    if not is_permuted(spec):
        return values.contiguous()
    return torch.empty_like(values).index_copy_(1, weight.parts["columns"].long(), values)


def _layout(order: Order) -> Layout:
    return Layout(
        order.name,
        lambda spec, shape: _fields(order, spec, shape),
        lambda weight: _decode(order, weight),
    )


LAYOUTS = {order.name: register_layout(_layout(order)) for order in ORDERS}
