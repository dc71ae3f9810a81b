"""The layout ``cpu.fields`` and the edges that lead to it: what torch itself decodes fast.

Comes in: a weight, or a run of its rows, in ``affine``, ``lookup`` or ``scaled``. Goes out: the
same weight, its rows one after the other.
Always holds: the edges are exact; decoding a run of rows takes a few passes over floats that are
written where they stay, and none over single codes.

``codes`` are, for a row,

* uint8 ``[N, ceil(K / F)]`` for affine codes, in fields of 1, 2, 4 or 8 bits, F to a byte, low end
  first. With B bytes in a row, field f of byte b is column ``f B + b``: one shift takes a run of
  columns out of as many bytes;
* int8 ``[N, K]`` for symmetric codes of more than 4 bits, less their middle, and for the values
  that a table's codes stand for;
* ``[N, K]`` of the spec's dtype for narrow floats.

``scale``, ``zero`` and ``offset`` are those of ``affine``. For the order *permuted* the columns
are sorted by group, and ``columns`` int32 ``[K]`` says which column is at each place; for
*indexed*, ``g_idx`` int32 ``[K]`` is the group of every column.

>>> spec = AffineSpec(bits=4, group=4, form="symmetric")
>>> w = QuantizedTensor(spec, "cpu.fields", (1, 4), {
...     "codes": torch.tensor([[0x89, 0xF0]], dtype=torch.uint8), "scale": torch.tensor([[0.5]])})
>>> w.dequantize().tolist()
[[0.5, -4.0, 0.0, 3.5]]
"""

from __future__ import annotations

import torch

from qcompile.edge import Edge, register_edge
from qcompile.errors import LayoutError
from qcompile.layout import Field, Layout, QuantizedTensor, Shape, register_layout
from qcompile.spec import AffineSpec, LookupSpec, ScaledSpec, Spec

NAME = "cpu.fields"
FieldSpec = AffineSpec | LookupSpec | ScaledSpec
_WIDTHS = (1, 2, 4, 8)


def packed_spec(spec: Spec) -> FieldSpec | None:
    """The spec itself where its weights can be stored so."""
    if isinstance(spec, ScaledSpec):
        return spec
    return spec if isinstance(spec, AffineSpec | LookupSpec) and not spec.nested else None


def _is_signed(spec: FieldSpec) -> bool:
    """Whether codes are stored as signed bytes."""
    if isinstance(spec, AffineSpec):
        return spec.form == "symmetric" and spec.bits > 4
    return isinstance(spec, LookupSpec)


def _per_byte(spec: FieldSpec) -> int:
    """Fields of a byte; 1 where a code is one."""
    if not isinstance(spec, AffineSpec):
        return 1
    return 8 // next(width for width in _WIDTHS if width >= spec.bits)


def _codes(spec: FieldSpec, n: int, k: int) -> Field:
    if isinstance(spec, ScaledSpec):
        return Field("codes", spec.dtype, (n, k))
    dtype = torch.int8 if _is_signed(spec) else torch.uint8
    return Field("codes", dtype, (n, -(-k // _per_byte(spec))))


def _fields(spec: Spec, shape: Shape) -> tuple[Field, ...]:
    if not isinstance(spec, FieldSpec) or packed_spec(spec) is None or len(shape) != 2:
        raise LayoutError(
            f"layout {NAME}",
            f"spec {spec}, shape {shape}",
            "a matrix of affine codes, of a table's or of narrow floats, with scales of their own",
            "keep the weight in its own layout",
        )
    n, k = shape
    groups = (n, -(-k // spec.group))
    fields = [_codes(spec, n, k), Field("scale", spec.scale, groups)]
    if not isinstance(spec, AffineSpec):
        return tuple(fields)
    if spec.form == "zero":
        fields.append(Field("zero", torch.int32, groups))
    if spec.form == "offset":
        fields.append(Field("offset", torch.float32, groups))
    if spec.order != "sequential":
        name = "columns" if spec.order == "permuted" else "g_idx"
        fields.append(Field(name, torch.int32, (k,), rows=0))
    return tuple(fields)


# **** packing ****


def _pack(weight: QuantizedTensor) -> QuantizedTensor:
    spec, parts = weight.spec, dict(weight.parts)
    assert isinstance(spec, FieldSpec)
    if isinstance(spec, ScaledSpec):
        packed = {"codes": parts["data"], "scale": parts["scale"]}
        return QuantizedTensor(spec, NAME, weight.shape, packed)
    codes = parts.pop("codes")
    if isinstance(spec, AffineSpec) and spec.order == "permuted":
        order = torch.argsort(parts.pop("g_idx"), stable=True)
        codes, parts["columns"] = codes[:, order], order.to(torch.int32)
    return QuantizedTensor(spec, NAME, weight.shape, {"codes": _narrowed(codes, spec), **parts})


def _narrowed(codes: torch.Tensor, spec: AffineSpec | LookupSpec) -> torch.Tensor:
    """Codes of one byte as the layout stores them."""
    if isinstance(spec, LookupSpec):
        return torch.tensor(spec.table, dtype=torch.int8)[codes.long()]
    if _is_signed(spec):
        return (codes.to(torch.int16) - (1 << (spec.bits - 1))).to(torch.int8)
    fields, (rows, columns) = _per_byte(spec), codes.shape
    run = -(-columns // fields)
    padded = torch.nn.functional.pad(codes, (0, run * fields - columns))
    out = torch.zeros(rows, run, dtype=torch.uint8)
    for field in range(fields):
        out |= padded[:, field * run : (field + 1) * run] << (8 // fields * field)
    return out


# **** decoding ****


def room_for(weight: QuantizedTensor) -> tuple[int, int]:
    """Floats and bytes that ``decode_into`` writes for a row; of the floats the first K count."""
    spec, k = weight.spec, weight.shape[1]
    assert isinstance(spec, FieldSpec)
    run = weight.parts["codes"].shape[1]
    # Wide enough for the last byte's fields and for the last group, which may both be cut short.
    return max(_per_byte(spec) * run, weight.parts["scale"].shape[1] * _group(spec, k)), run


def decode_into(weight: QuantizedTensor, room: torch.Tensor, scratch: torch.Tensor) -> None:
    """Write a weight's rows, its columns as they are stored; the order *permuted* has its own."""
    spec = weight.spec
    assert isinstance(spec, FieldSpec)
    _spread_codes(weight.parts["codes"], spec, room, scratch)
    _scale(room, weight, _group(spec, weight.shape[1]))


def _group(spec: FieldSpec, k: int) -> int:
    return max(1, min(spec.group, k))


def _decode(weight: QuantizedTensor) -> torch.Tensor:
    floats, codes = room_for(weight)
    room = torch.empty(weight.shape[0], floats)
    decode_into(weight, room, torch.empty(weight.shape[0], codes, dtype=torch.uint8))
    if "columns" not in weight.parts:
        return room[:, : weight.shape[1]]
    return room[:, torch.argsort(weight.parts["columns"])]


def _spread_codes(
    codes: torch.Tensor, spec: FieldSpec, room: torch.Tensor, scratch: torch.Tensor
) -> None:
    """Codes as floats, less their middle where they are symmetric."""
    run, fields = codes.shape[1], _per_byte(spec)
    if fields == 1:
        room[:, :run] = codes
        return
    assert isinstance(spec, AffineSpec)
    width = 8 // fields
    for field in range(fields):
        part = torch.bitwise_right_shift(codes, field * width, out=scratch)
        if field < fields - 1:
            part &= (1 << width) - 1
        if spec.form == "symmetric":  # while they are bytes
            part = part.view(torch.int8).sub_(1 << (spec.bits - 1))
        room[:, field * run : (field + 1) * run] = part


def _scale(room: torch.Tensor, weight: QuantizedTensor, group: int) -> None:
    """The spec's formula on codes, term by term, in place."""
    parts = weight.parts
    if "g_idx" in parts:
        index = parts["g_idx"].long()
        room = room[:, : len(index)]
    else:
        groups = parts["scale"].shape[1]
        room = room[:, : groups * group].unflatten(1, (groups, group))

    def spread(values: torch.Tensor) -> torch.Tensor:
        wide = values.float()
        return wide[:, index] if "g_idx" in parts else wide[:, :, None]

    if "zero" in parts:
        room.sub_(spread(parts["zero"]))
    room.mul_(spread(parts["scale"]))
    if "offset" in parts:
        room.add_(spread(parts["offset"]))


FIELDS = register_layout(Layout(NAME, _fields, _decode))
EDGES = tuple(
    register_edge(Edge(source, NAME, packed_spec, _pack))
    for source in ("affine", "lookup", "scaled")
)
