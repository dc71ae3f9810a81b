"""The layout ``cpu.aten_int4`` and the edges that lead to it: what aten's own int4 product reads.

Comes in: a weight ``[N, K]``, or a run of its rows, in ``affine`` or ``lookup``. Goes out: the same
weight as one or two planes of 4-bit codes.
Always holds: codes are exact; scales and zeros are rounded once, to bfloat16, which each edge says.

``torch.ops.aten._weight_int4pack_mm_for_cpu`` computes ``x @ w.T`` with
``w[n, k] = (code[n, k] - 8) * scale[n, g] + zero[n, g]`` for groups of 32, 64, 128 or 256 columns;
with bfloat16 activations scales and zeros are bfloat16 too, and sums are float32. (The formula was
found by experiment with torch 2.13; ``tests/backends/cpu/test_aten_int4.py`` asks it again.) The
weight is what the planes and halves below add up to:

* *planes*: codes of up to 4 bits are one, as are values of a table from -8 to 7; wider ones are
  8-bit codes cut into high and low: ``(c - 128) * s = (high - 8) * 16 s + 8 s + (low - 8) * s``;
* *halves*: groups that are multiples of 32 have one; groups of 16 share a group of 32, which is
  multiplied twice: with the scales of its first 16 columns and the others' activations zero, and
  the other way round.

``codes`` uint8 ``[planes, blocks, 32 K]``: a block is 64 rows, as
``_convert_weight_to_int4pack_for_cpu`` packs them on this machine (``lanes`` finds out how);
``scale_zero`` bfloat16 ``[planes, halves, K / unit, blocks, 64, 2]``. Missing rows have scale 0.
For the order *permuted* the columns are sorted by group, and ``columns`` int32 ``[K]`` says which
one is at each place; the kernel gathers the activations.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from qcompile.edge import Edge, register_edge
from qcompile.errors import LayoutError
from qcompile.layout import Field, Layout, QuantizedTensor, Shape, register_layout
from qcompile.spec import AffineForm, AffineSpec, LookupSpec, Spec

NAME = "cpu.aten_int4"
ROWS = 64  # the widest block of aten's, so that every block is a whole one
UNITS = (256, 128, 64, 32)  # groups of aten's
_HALF = 16
_LARGEST = 2.0**120
_ROUNDED = "scales and zeros are rounded to bfloat16, by at most 2**-9 of each"


# **** specs and shapes ****


def packed_spec(spec: Spec) -> AffineSpec | None:
    """What becomes of a spec, or None where it does not fit."""
    if not isinstance(spec, AffineSpec | LookupSpec) or spec.nested or spec.group % _HALF:
        return None
    if isinstance(spec, LookupSpec):
        narrow = min(spec.table) >= -8 and max(spec.table) < 8
        return AffineSpec(4 if narrow else 8, spec.group, "symmetric", torch.bfloat16)
    if spec.order == "indexed":
        return None
    form: AffineForm = "symmetric" if spec.form == "symmetric" else "offset"
    return AffineSpec(4 if spec.bits <= 4 else 8, spec.group, form, torch.bfloat16, spec.order)


def is_exact(spec: Spec) -> bool:
    """Whether bfloat16 holds all that a weight of this spec has beside its codes."""
    if isinstance(spec, AffineSpec) and spec.form != "symmetric":
        return False
    return isinstance(spec, AffineSpec | LookupSpec) and spec.scale == torch.bfloat16


def unit_of(group: int, k: int) -> int | None:
    """Columns of a group as aten is told, or None where none fits: every unit is in one group."""
    if group % 32 and group < k:
        return 32 if group == _HALF and k % 32 == 0 else None
    return next((u for u in UNITS if k % u == 0 and (group >= k or group % u == 0)), None)


def halves_of(group: int) -> int:
    """How many times each plane is multiplied."""
    return 2 if group == _HALF else 1


def planes_of(spec: AffineSpec) -> int:
    """Planes of 4 bits."""
    return spec.bits // 4


def _fields(spec: Spec, shape: Shape) -> tuple[Field, ...]:
    fits = isinstance(spec, AffineSpec) and packed_spec(spec) == spec and len(shape) == 2
    unit = unit_of(spec.group, shape[1]) if fits and isinstance(spec, AffineSpec) else None
    if unit is None or not isinstance(spec, AffineSpec):
        raise LayoutError(
            f"layout {NAME}",
            f"spec {spec}, shape {shape}",
            "4 or 8 bits, bfloat16 scales, columns in whole groups of 16 or of multiples of 32",
            "keep the weight in its own layout",
        )
    n, k = shape
    planes, halves, blocks = planes_of(spec), halves_of(spec.group), -(-n // ROWS)
    scales = (planes, halves, k // unit, blocks, ROWS, 2)
    fields = (
        Field("codes", torch.uint8, (planes, blocks, ROWS * k // 2), rows=ROWS, axis=1),
        Field("scale_zero", torch.bfloat16, scales, rows=ROWS, axis=3),
    )
    if spec.order == "permuted":
        return (*fields, Field("columns", torch.int32, (k,), rows=0))
    return fields


# **** packing ****


def _pack(weight: QuantizedTensor) -> QuantizedTensor:
    spec = packed_spec(weight.spec)
    assert spec is not None
    n, k = weight.shape
    unit, levels = unit_of(spec.group, k), 1 << spec.bits
    assert unit is not None
    order = None
    if spec.order == "permuted":
        order = torch.argsort(weight.parts["g_idx"], stable=True)
    codes, scale, zero = _centred(weight, levels, order)
    codes = torch.nn.functional.pad(codes, (0, 0, 0, -n % ROWS), value=levels // 2)
    nibbles = [codes] if levels == 16 else [codes >> 4, codes & 15]
    steps = [(scale, zero)]
    _refuse_huge(scale, zero)
    if levels > 16:  # both sums stay near zero, and so does what rounding them takes
        steps = [(16 * scale, zero + 8 * scale), (scale, torch.zeros_like(zero))]
    convert = torch.ops.aten._convert_weight_to_int4pack_for_cpu
    planes = [convert(plane.to(torch.int32), 1) for plane in nibbles]
    parts = {
        "codes": torch.stack(planes).reshape(len(planes), -1, ROWS * k // 2),
        "scale_zero": torch.stack([_scales(s, z, spec.group, unit, k) for s, z in steps]),
    }
    if order is not None:
        parts["columns"] = order.to(torch.int32)
    return QuantizedTensor(spec, NAME, weight.shape, parts)


def _centred(
    weight: QuantizedTensor, levels: int, order: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes in order, scales and zeros: ``w = (code - levels / 2) * scale + zero``.

    Whole zeros move into the codes as far as these have room, and are exact there.
    """
    spec, scale, middle = weight.spec, weight.parts["scale"].float(), levels // 2
    codes = weight.parts["codes"] if order is None else weight.parts["codes"][:, order]
    if isinstance(spec, LookupSpec):
        table = torch.tensor(spec.table, dtype=torch.int16) + middle
        return table[codes.long()].to(torch.uint8), scale, torch.zeros_like(scale)
    assert isinstance(spec, AffineSpec)
    own = 1 << (spec.bits - 1)  # the middle of the codes as they are
    if spec.form == "zero":
        zeros = weight.parts["zero"]
        shift = (middle - zeros).clamp(0, levels - 2 * own)
        moved = shift.to(torch.uint8).repeat_interleave(min(spec.group, codes.shape[1]), 1)
        return codes + moved[:, : codes.shape[1]], scale, scale * (middle - shift - zeros)
    zero = torch.zeros_like(scale)
    if spec.form == "offset":
        zero = weight.parts["offset"] + own * scale
    return codes + (middle - own), scale, zero


def _refuse_huge(scale: torch.Tensor, zero: torch.Tensor) -> None:
    """Raise where a number of the weight would become infinite: planes multiply scales by 16."""
    largest = torch.maximum(scale.abs(), zero.abs())
    if bool((largest.isfinite() & (largest > _LARGEST)).any()):
        raise LayoutError(
            f"layout {NAME}",
            f"a scale or zero of {float(largest[largest.isfinite()].max()):.3g}",
            f"at most {_LARGEST:.3g}",
            "name another dtype of activations than bfloat16",
        )


def _scales(scale: torch.Tensor, zero: torch.Tensor, group: int, unit: int, k: int) -> torch.Tensor:
    """bfloat16 ``[halves, K / unit, blocks, ROWS, 2]``."""
    both = torch.stack([scale, zero], -1).to(torch.bfloat16)
    both = torch.nn.functional.pad(both, (0, 0, 0, 0, 0, -len(both) % ROWS))
    if group == _HALF:
        halves = [both[:, 0::2], both[:, 1::2]]
    else:
        halves = [both[:, torch.arange(0, k, unit) // group]]
    return torch.stack([half.transpose(0, 1).unflatten(1, (-1, ROWS)) for half in halves])


# **** reading ****


@dataclass(frozen=True)
class Lanes:
    """How aten packs a block on this machine: K runs of ``rows / 2`` bytes.

    Attributes:
        rows: rows of a block.
        byte: int64 ``[rows]``: which byte of a run holds a row.
        shift: int64 ``[rows]``: 0 for its low half, 4 for its high one.
        order: int64 ``[rows]``: where a row is in the low halves followed by the high ones; None
            where they are in order.
    """

    rows: int
    byte: torch.Tensor
    shift: torch.Tensor
    order: torch.Tensor | None


@functools.cache
def lanes() -> Lanes:
    """What packing the bits of each place's own number tells: it depends on aten's vectors."""
    places = torch.arange(2 * ROWS).reshape(ROWS, 2)
    found = torch.zeros(2, ROWS, dtype=torch.int64)
    for bit in range(8):
        plane = (places >> bit & 1).to(torch.int32)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(plane, 1).flatten().long()
        found += torch.stack([packed & 1, packed >> 4 & 1]) << bit
    row, column = found // 2, found % 2
    half = int(column[0].argmax())  # bytes before the first one of the second column
    order = torch.argsort(row[:, :half].flatten())
    byte, shift = order % half, 4 * (order // half)
    in_order = torch.equal(order, torch.arange(2 * half))
    return Lanes(2 * half, byte, shift, None if in_order else order)


def decode_rows(
    codes: torch.Tensor, scale_zero: torch.Tensor, k: int, rows: torch.Tensor
) -> torch.Tensor:
    """Some rows of a weight in this layout, float32 ``[len(rows), K]``.

    Args:
        codes, scale_zero: the layout's parts.
        k: columns of the weight.
        rows: int64 row numbers.
    """
    packing, out = lanes(), torch.zeros(len(rows), k)
    place = rows % packing.rows
    for plane, both in zip(codes, scale_zero, strict=True):
        blocks = plane.reshape(-1, k, packing.rows // 2)
        pairs = blocks[rows // packing.rows, :, packing.byte[place]]
        nibbles = (pairs >> packing.shift[place, None] & 15).float() - 8
        scale, zero = _of_columns(both, k, rows).unbind()
        out += nibbles * scale + zero
    return out


def _of_columns(scale_zero: torch.Tensor, k: int, rows: torch.Tensor) -> torch.Tensor:
    """Scales and zeros of one plane for rows: float32 ``[2, len(rows), K]``."""
    halves, units = scale_zero.shape[:2]
    chosen = scale_zero.reshape(halves, units, -1, 2)[:, :, rows].float()
    return chosen.permute(3, 2, 1, 0).flatten(2).repeat_interleave(k // units // halves, 2)


def decode_blocks(
    codes: torch.Tensor, scale_zero: torch.Tensor, run: slice, out: torch.Tensor
) -> None:
    """The planes of some of aten's blocks, transposed, their rows as the bytes hold them.

    Args:
        codes, scale_zero: the layout's parts.
        run: which blocks.
        out: float32 ``[planes, blocks, K, rows of a block]``, which is filled.
    """
    k, rows = out.shape[2:]
    halves, units = scale_zero.shape[1:3]
    order = lanes().order
    for plane, both, tile in zip(codes, scale_zero, out, strict=True):
        pairs = plane.view(-1, k, rows // 2)[run]
        # Eight is taken off while a code is a byte.
        tile[..., : rows // 2] = (pairs & 15).view(torch.int8).sub_(8)
        tile[..., rows // 2 :] = (pairs >> 4).view(torch.int8).sub_(8)
        groups = both.view(halves, units, -1, rows, 2)[:, :, run]
        if order is not None:
            groups = groups[:, :, :, torch.argsort(order)]
        scale, zero = groups.float().permute(4, 2, 1, 0, 3).contiguous().unbind()
        by_group = tile.view(len(tile), units, halves, k // units // halves, rows)
        by_group.mul_(scale.unsqueeze(3)).add_(zero.unsqueeze(3))


def _decode(weight: QuantizedTensor) -> torch.Tensor:
    n, k = weight.shape
    codes, scale_zero, *columns = weight.parts.values()
    decoded = decode_rows(codes, scale_zero, k, torch.arange(n))
    return decoded[:, torch.argsort(columns[0])] if columns else decoded


ATEN_INT4 = register_layout(Layout(NAME, _fields, _decode))
EDGES = tuple(
    register_edge(Edge(source, NAME, packed_spec, _pack, error=_ROUNDED, exact=is_exact))
    for source in ("affine", "lookup")
)
