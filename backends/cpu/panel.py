"""The layout ``cpu.panel`` and its ops; edges that lead to it have files of their own.

A panel is 16 output rows interleaved: one SIMD lane is one row. ``csrc/panel.h`` says where each
byte lies; the decoder below says it again in torch and is what the conformance tests read.

``blob`` uint8 ``[ceil(N / 16), panel bytes]``; ``table`` int8 ``[16]``, the values of a lookup
spec, zeros otherwise. A panel is a run of chunks of at most 256 columns (see ``geometry``), each a
run of parts that begin at multiples of 64 bytes:

* heads: for every group 16 scales (f16 or f32), then 16 offsets (f32) or zeros (int16) where the
  form has them. Where the spec's scales are *nested*, first 16 factors (f16; 16 of the offsets
  too), then for every group 16 steps (int8; 16 of the offsets too): a scale is its factor times its
  step;
* codes in units of 16 columns, 4 quads of 4 columns: a quad is 64 bytes, byte ``4 r + b`` for
  column ``b`` of row ``r``. Codes of 8 bits are quads. Others are cut, low end first, in 4, 2 and 1
  bits, and each kind has a part of its own: *nibbles* (a byte of the first 64 holds quads 0 and 1,
  of the next 64 quads 2 and 3, low half first), *pairs* (bits ``2 q`` of a byte for quad ``q``) and
  *bits* (8 bytes a quad, bit ``4 r + b``).

Groups are padded to whole units, and those of more than 256 columns are cut evenly. For the order
*permuted* also ``columns`` int32 ``[K]``: the panels hold column ``columns[i]`` of the weight at
place ``i``, so that groups run in order; kernels gather the input.

Row 0 has the codes 0 to 15, four to a quad; a byte of nibbles holds one of two quads each:

>>> import torch
>>> from qcompile.spec import AffineSpec
>>> spec = AffineSpec(bits=4, group=16, form="symmetric", scale=torch.float32)
>>> heads, nibbles = torch.zeros(64, dtype=torch.uint8), torch.zeros(2, 64, dtype=torch.uint8)
>>> heads[:4] = torch.tensor([0.5]).view(torch.uint8)
>>> nibbles[0, :4] = torch.tensor([0x40, 0x51, 0x62, 0x73])
>>> nibbles[1, :4] = torch.tensor([0xC8, 0xD9, 0xEA, 0xFB])
>>> w = QuantizedTensor(spec, "cpu.panel", (1, 16), {
...     "blob": torch.cat([heads, nibbles.flatten()])[None],
...     "table": torch.zeros(16, dtype=torch.int8)})
>>> w.dequantize()[0, :8].tolist()
[-4.0, -3.5, -3.0, -2.5, -2.0, -1.5, -1.0, -0.5]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from qcompile.errors import LayoutError
from qcompile.layout import Field, Layout, QuantizedTensor, Shape, register_layout
from qcompile.spec import AffineSpec, LookupSpec, ScaledSpec, Spec

NAME = "cpu.panel"
ROWS, UNIT, CHUNK, LINE = 16, 16, 256, 64
_FORMS = {"symmetric": 0, "zero": 1, "offset": 2}
_LOOKUP, _FLOAT8 = 3, 4
ZERO, OFFSET = 1, 2
PLAIN_F32, PLAIN_F16, NESTED = 0, 1, 2
PanelSpec = AffineSpec | LookupSpec | ScaledSpec

library = torch.library.Library("qcompile_cpu", "DEF")
for _schema in (
    "panel_linear(Tensor x, Tensor blob, Tensor table, Tensor? bias, int[] shape, int digits)"
    " -> Tensor",
    "panel_linears(Tensor x, Tensor[] parts, Tensor?[] biases, int[] shapes, int digits)"
    " -> Tensor[]",
    "panel_embedding(Tensor ids, Tensor blob, Tensor table, int[] shape, ScalarType dtype)"
    " -> Tensor",
    "panel_pack(Tensor codes, Tensor scale, Tensor? extra, int[] shape, int group) -> Tensor",
    "panel_from_blocks(Tensor data, str type, int[] shape, Tensor(a!) blob) -> ()",
    "panel_from_words(Tensor words, Tensor scale, Tensor? zero, Tensor? columns, int[] shape,"
    " int group, int[] steps, int packing, Tensor(a!) blob) -> ()",
):
    library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


# **** specs ****


def bits_of(spec: PanelSpec) -> int:
    """Width of a code."""
    return 8 if isinstance(spec, ScaledSpec) else spec.bits


def form_of(spec: PanelSpec) -> int:
    """The number of a spec's formula in the native code."""
    if isinstance(spec, ScaledSpec):
        return _FLOAT8
    return _LOOKUP if isinstance(spec, LookupSpec) else _FORMS[spec.form]


def is_nested(spec: PanelSpec) -> bool:
    """Whether scales are products of a factor and a step."""
    return not isinstance(spec, ScaledSpec) and spec.nested != 0


def is_permuted(spec: Spec) -> bool:
    """Whether panels of this spec hold the columns in an order of their own."""
    return isinstance(spec, AffineSpec) and spec.order == "permuted"


def _divisor(group: int) -> int:
    """The widest even cut of a group that a chunk holds."""
    return next(size for size in range(CHUNK, 0, -1) if group % size == 0)


def group_of(spec: PanelSpec, k: int) -> int:
    """Columns of a group as panels have it, 256 at most."""
    if spec.group <= CHUNK:
        return min(spec.group, k)
    return min(CHUNK, k) if spec.group >= k else _divisor(spec.group)


def unfit(spec: Spec) -> str | None:
    """Why a spec cannot be stored as panels, or None when it can."""
    if not isinstance(spec, PanelSpec):
        return f"spec {spec} is not affine, a lookup or a narrow float"
    if isinstance(spec, ScaledSpec) and spec.dtype != torch.float8_e4m3fn:
        return f"narrow floats must be float8_e4m3fn, not {spec.dtype}"
    if isinstance(spec, AffineSpec) and spec.order == "indexed":
        return "groups of a panel have one size; this weight's group index makes them uneven"
    if spec.scale not in (torch.float16, torch.float32):
        return f"scales must be float16 or float32, not {spec.scale}"
    if not 1 <= bits_of(spec) <= (4 if isinstance(spec, LookupSpec) else 8):
        return f"{bits_of(spec)} bits; panels hold 1 to 8, and 4 at most with a table"
    if isinstance(spec, ScaledSpec) or not spec.nested:
        return None
    if spec.nested != CHUNK or CHUNK % spec.group or form_of(spec) == ZERO:
        return f"nested scales must share a factor in {CHUNK} columns, not {spec.nested}"
    return None


# **** geometry ****


@dataclass(frozen=True)
class Part:
    """A run of groups that lie together: a chunk, in bytes from the start of a panel.

    Attributes:
        heads: where its heads begin.
        codes: where its codes begin.
        end: where the next chunk begins.
        groups: number of groups.
        columns: columns of the weight in it.
        units: units of each group.
    """

    heads: int
    codes: int
    end: int
    groups: int
    columns: int
    units: tuple[int, ...]


def _up(count: int, step: int) -> int:
    return -(-count // step) * step


def _head_bytes(spec: PanelSpec) -> tuple[int, int]:
    """Bytes of the factors of a chunk and of the head of a group."""
    form = form_of(spec)
    if is_nested(spec):
        return (64, 32) if form == OFFSET else (32, 16)
    return 0, ROWS * (spec.scale.itemsize + {ZERO: 2, OFFSET: 4}.get(form, 0))


def geometry(spec: PanelSpec, k: int) -> Iterator[Part]:
    """The chunks of a panel."""
    group, bits, at = group_of(spec, k), bits_of(spec), 0
    together = CHUNK // _up(group, UNIT)
    factors, head = _head_bytes(spec)
    for start in range(0, k, together * group):
        columns = min(together * group, k - start)
        sizes = [min(group, columns - g) for g in range(0, columns, group)]
        units = tuple(_up(size, UNIT) // UNIT for size in sizes)
        codes = at + _up(factors + len(sizes) * head, LINE)
        size = sum(units) * 32 * (bits - bits % 2) + _up(sum(units) * 32 * (bits % 2), LINE)
        yield Part(at, codes, codes + size, len(sizes), columns, units)
        at = codes + size


def arguments(spec: Spec, shape: Shape) -> list[int]:
    """``n, k, bits, group, form, scale`` as the ops take them."""
    assert isinstance(spec, PanelSpec)
    n, k = shape
    plain = PLAIN_F16 if spec.scale == torch.float16 else PLAIN_F32
    scale = NESTED if is_nested(spec) else plain
    return [n, k, bits_of(spec), group_of(spec, k), form_of(spec), scale]


def _fields(spec: Spec, shape: Shape) -> tuple[Field, ...]:
    n, k = shape
    reason = unfit(spec)
    if reason:
        raise LayoutError(f"layout {NAME}", reason, "a spec that fits", "choose another kernel")
    assert isinstance(spec, PanelSpec)
    *_, last = geometry(spec, k)
    blob = Field("blob", torch.uint8, (-(-n // ROWS), last.end), rows=ROWS)
    table = Field("table", torch.int8, (16,), rows=0)
    if not is_permuted(spec):
        return blob, table
    return blob, table, Field("columns", torch.int32, (k,), rows=0)


# **** decoding ****


def _decode(weight: QuantizedTensor) -> torch.Tensor:
    spec, (n, k), blob = weight.spec, weight.shape, weight.parts["blob"]
    assert isinstance(spec, PanelSpec)
    values = [_chunk(blob, part, weight, spec) for part in geometry(spec, k)]
    out = torch.cat(values, 1).transpose(1, 2).reshape(len(blob) * ROWS, k)[:n]
    if not is_permuted(spec):
        return out
    return torch.empty_like(out).index_copy_(1, weight.parts["columns"].long(), out)


def _chunk(
    blob: torch.Tensor, part: Part, weight: QuantizedTensor, spec: PanelSpec
) -> torch.Tensor:
    """Float32 ``[panel, column, row]`` of a chunk."""
    codes = _codes(blob[:, part.codes : part.end], sum(part.units), bits_of(spec))
    scale, extra = _heads(blob[:, part.heads : part.codes], part.groups, spec)
    size, at, out = group_of(spec, weight.shape[1]), 0, []
    for group, units in enumerate(part.units):
        columns = min(size, part.columns - group * size)
        here = codes[:, at : at + columns]
        more = None if extra is None else extra[:, group, None]
        out.append(_values(here, scale[:, group, None], more, weight))
        at += units * UNIT
    return torch.cat(out, 1)


def _codes(parts: torch.Tensor, units: int, bits: int) -> torch.Tensor:
    """Codes ``[panel, column, row]`` of the code parts of a chunk."""
    panels = len(parts)
    if bits == 8:
        quads = parts.reshape(panels, units, 4, ROWS, 4)
        return quads.transpose(3, 4).reshape(panels, units * UNIT, ROWS)
    quads = torch.zeros(panels, units, 4, LINE, dtype=torch.uint8)
    at = 0
    if bits & 4:
        nibbles = parts[:, : units * 128].reshape(panels, units, 2, 1, LINE)
        quads |= torch.cat([nibbles & 15, nibbles >> 4], 3).reshape(quads.shape)
        at += units * 128
    if bits & 2:
        pairs = parts[:, at : at + units * 64].reshape(panels, units, 1, LINE)
        shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
        quads |= (pairs >> shifts & 3) << (bits & 4)
        at += units * 64
    if bits & 1:
        masks = parts[:, at : at + units * 32].reshape(panels, units, 4, 8, 1)
        ones = masks >> torch.arange(8, dtype=torch.uint8) & 1
        quads |= ones.reshape(quads.shape) << (bits & 6)
    quads = quads.reshape(panels, units, 4, ROWS, 4).transpose(3, 4)
    return quads.reshape(panels, units * UNIT, ROWS)


def _heads(
    heads: torch.Tensor, groups: int, spec: PanelSpec
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales, and zeros or offsets, as float32 ``[panel, group, row]``."""
    factors, size = _head_bytes(spec)
    form, panels = form_of(spec), len(heads)
    each = heads[:, factors : factors + groups * size].reshape(panels, groups, size)
    if is_nested(spec):
        factor = heads[:, :factors].contiguous().view(torch.float16).float()[:, None]
        step = each.contiguous().view(torch.int8).float()
        extra = factor[..., ROWS:] * step[..., ROWS:] if form == OFFSET else None
        return factor[..., :ROWS] * step[..., :ROWS], extra
    split = ROWS * spec.scale.itemsize
    scale = each[..., :split].contiguous().view(spec.scale).float()
    if size == split:
        return scale, None
    dtype = torch.int16 if form == ZERO else torch.float32
    return scale, each[..., split:].contiguous().view(dtype).float()


def _values(
    codes: torch.Tensor, scale: torch.Tensor, extra: torch.Tensor | None, weight: QuantizedTensor
) -> torch.Tensor:
    spec = weight.spec
    if isinstance(spec, LookupSpec):
        return scale * weight.parts["table"].float()[codes.long()]
    if isinstance(spec, ScaledSpec):
        return scale * codes.contiguous().view(spec.dtype).float()
    assert isinstance(spec, AffineSpec)
    if extra is None:
        return scale * (codes.float() - 2.0 ** (spec.bits - 1))
    if spec.form == "zero":
        return scale * (codes.float() - extra)
    return scale * codes.float() + extra


PANEL = register_layout(Layout(NAME, _fields, _decode))
