"""The layout ``cpu.panel``, its ops, and the edges that lead to it.

A panel is 16 output rows interleaved: one SIMD lane is one row. ``csrc/panel.h`` says where each
bit lies; the decoder below says it again in torch and is what the conformance tests read.

``blob`` uint8 ``[ceil(N / 16), panel bytes]``; ``table`` int8 ``[16]``, the values of a lookup
spec, zeros otherwise. A panel is, for each group: 16 scales (f16 or f32), 16 zeros or offsets
(f32, forms *zero* and *offset* only), then units of 8 columns. A row's 8 codes in a unit are one
little-endian number of ``bits`` bytes, code ``c`` at bits ``[c * bits, (c + 1) * bits)``, cut into
words of 4, 2 and 1 bytes; each word is stored for all 16 rows before the next. Codes of the form
*symmetric* are stored minus ``2**(bits - 1)``, in two's complement. Groups are padded to a multiple
of 8 columns. For the order *permuted* also ``columns`` int32 ``[K]``: the panels hold column
``columns[i]`` of the weight at place ``i``, so that groups run in order; kernels gather the input.

Codes ``0..7`` of 4 bits are ``-8..-1``, the nibbles 8 to 15, lowest first, in a row's one word:

>>> import torch
>>> from qcompile.spec import AffineSpec
>>> spec = AffineSpec(bits=4, group=8, form="symmetric", scale=torch.float32)
>>> unit = torch.zeros(16, 4, dtype=torch.uint8)
>>> unit[0] = torch.tensor([0x98, 0xBA, 0xDC, 0xFE])
>>> scales = torch.zeros(16); scales[0] = 0.5
>>> blob = torch.cat([scales.view(torch.uint8), unit.flatten()])[None]
>>> w = QuantizedTensor(spec, "cpu.panel", (1, 8), {
...     "blob": blob, "table": torch.zeros(16, dtype=torch.int8)})
>>> w.dequantize().tolist()
[[-4.0, -3.5, -3.0, -2.5, -2.0, -1.5, -1.0, -0.5]]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from qcompile.backends.cpu.build import load_library
from qcompile.edge import Edge, register_edge
from qcompile.errors import LayoutError
from qcompile.layout import Field, Layout, QuantizedTensor, Shape, register_layout
from qcompile.spec import AffineSpec, LookupSpec, ScaledSpec, Spec

NAME = "cpu.panel"
ROWS, UNIT = 16, 8
_FORMS = {"symmetric": 0, "zero": 1, "offset": 2}
_LOOKUP, _FLOAT8 = 3, 4
PanelSpec = AffineSpec | LookupSpec | ScaledSpec

library = torch.library.Library("qcompile_cpu", "DEF")
_SHAPE = "int n, int k, int bits, int group, int form, int scale"
for _schema in (
    f"panel_linear(Tensor x, Tensor blob, Tensor table, Tensor? bias, {_SHAPE}) -> Tensor",
    f"panel_embedding(Tensor ids, Tensor blob, Tensor table, {_SHAPE}, ScalarType dtype) -> Tensor",
    "panel_pack(Tensor codes, Tensor scale, Tensor? extra, int bits, int group, int form)"
    " -> Tensor",
):
    library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def bits_of(spec: PanelSpec) -> int:
    """Width of a code."""
    return 8 if isinstance(spec, ScaledSpec) else spec.bits


def form_of(spec: PanelSpec) -> int:
    """The number of a spec's formula in the native code."""
    if isinstance(spec, ScaledSpec):
        return _FLOAT8
    return _LOOKUP if isinstance(spec, LookupSpec) else _FORMS[spec.form]


def arguments(spec: Spec, shape: Shape) -> tuple[int, int, int, int, int, int]:
    """``n, k, bits, group, form, scale`` as the ops take them."""
    assert isinstance(spec, PanelSpec)
    n, k = shape
    return n, k, bits_of(spec), min(spec.group, k), form_of(spec), int(spec.scale == torch.float16)


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
    return None


def is_permuted(spec: Spec) -> bool:
    """Whether panels of this spec hold the columns in an order of their own."""
    return isinstance(spec, AffineSpec) and spec.order == "permuted"


def _head(spec: PanelSpec) -> int:
    extra = 4 if form_of(spec) in (1, 2) else 0
    return ROWS * (spec.scale.itemsize + extra)


def _group_columns(spec: PanelSpec, k: int) -> Iterator[int]:
    for start in range(0, k, spec.group):
        yield min(spec.group, k - start)


def _fields(spec: Spec, shape: Shape) -> tuple[Field, ...]:
    n, k = shape
    reason = unfit(spec)
    if reason:
        raise LayoutError(f"layout {NAME}", reason, "a spec that fits", "choose another kernel")
    assert isinstance(spec, PanelSpec)
    full, rest = divmod(k, spec.group)
    unit = ROWS * bits_of(spec)
    each = _head(spec) + -(-spec.group // UNIT) * unit
    last = _head(spec) + -(-rest // UNIT) * unit if rest else 0
    blob = Field("blob", torch.uint8, (-(-n // ROWS), full * each + last), rows=ROWS)
    table = Field("table", torch.int8, (16,), rows=0)
    if not is_permuted(spec):
        return blob, table
    return blob, table, Field("columns", torch.int32, (k,), rows=0)


def _decode(weight: QuantizedTensor) -> torch.Tensor:
    spec, (n, k), blob = weight.spec, weight.shape, weight.parts["blob"]
    assert isinstance(spec, PanelSpec)
    out, at, bits = [], 0, bits_of(spec)
    for columns in _group_columns(spec, k):
        head, size = blob[:, at : at + _head(spec)], -(-columns // UNIT) * ROWS * bits
        body = blob[:, at + _head(spec) : at + _head(spec) + size]
        codes = _codes(body.reshape(len(blob), -1, ROWS * bits), bits)
        out.append(_values(codes, head, weight)[:, :columns])
        at += _head(spec) + size
    values = torch.cat(out, 1).transpose(1, 2).reshape(-1, k)[:n]
    if not is_permuted(spec):
        return values
    return torch.empty_like(values).index_copy_(1, weight.parts["columns"].long(), values)


def _codes(units: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes ``[panel, column, row]`` of units ``[panel, unit, 16 * bits bytes]``."""
    numbers = torch.zeros(*units.shape[:2], ROWS, dtype=torch.int64)
    at = shift = 0
    for width in _words(bits):
        word = units[:, :, at : at + ROWS * width].reshape(*units.shape[:2], ROWS, width)
        for byte in range(width):
            numbers |= word[..., byte].to(torch.int64) << (shift + 8 * byte)
        at, shift = at + ROWS * width, shift + 8 * width
    fields = [numbers >> (bits * column) & ((1 << bits) - 1) for column in range(UNIT)]
    return torch.stack(fields, 2).flatten(1, 2)


def _words(bits: int) -> tuple[int, ...]:
    """Bytes of the words of a unit, in the order in which they are stored."""
    return (4, 4) if bits == 8 else tuple(width for width in (4, 2, 1) if bits & width)


def _values(codes: torch.Tensor, head: torch.Tensor, weight: QuantizedTensor) -> torch.Tensor:
    spec = weight.spec
    assert isinstance(spec, PanelSpec)
    size = ROWS * spec.scale.itemsize
    scale = head[:, :size].contiguous().view(spec.scale).float()[:, None]
    if isinstance(spec, LookupSpec):
        return scale * weight.parts["table"].float()[codes.long()]
    if isinstance(spec, ScaledSpec):
        return scale * codes.to(torch.uint8).view(spec.dtype).float()
    middle = 1 << (spec.bits - 1)
    codes = codes ^ middle
    if spec.form == "symmetric":
        return scale * (codes - middle).float()
    extra = head[:, size:].contiguous().view(torch.float32)[:, None]
    if spec.form == "zero":
        return scale * (codes.float() - extra)
    return scale * codes.float() + extra


def _target(spec: Spec) -> Spec | None:
    if isinstance(spec, PanelSpec) and spec.scale == torch.bfloat16:
        spec = replace(spec, scale=torch.float32)  # wider, hence exact
    return None if unfit(spec) else spec


def _pack(weight: QuantizedTensor) -> QuantizedTensor:
    spec = _target(weight.spec)
    assert isinstance(spec, PanelSpec)
    load_library()
    extra = None
    if form_of(spec) in (1, 2):
        extra = weight.parts["zero" if form_of(spec) == 1 else "offset"].float().contiguous()
    group = min(spec.group, weight.shape[1])
    codes = _float8_codes(weight) if isinstance(spec, ScaledSpec) else weight.parts["codes"]
    order = None
    if is_permuted(spec):
        order = torch.argsort(weight.parts["g_idx"], stable=True)
        codes = codes.index_select(1, order)
    blob = torch.ops.qcompile_cpu.panel_pack(
        codes.contiguous(),
        weight.parts["scale"].to(spec.scale).contiguous(),
        extra,
        bits_of(spec),
        group,
        form_of(spec),
    )
    table = torch.zeros(16, dtype=torch.int8)
    if isinstance(spec, LookupSpec):
        table[: len(spec.table)] = torch.tensor(spec.table, dtype=torch.int8)
    parts = {"blob": blob, "table": table}
    if order is not None:
        parts["columns"] = order.to(torch.int32)
    return QuantizedTensor(spec, NAME, weight.shape, parts)


def _float8_codes(weight: QuantizedTensor) -> torch.Tensor:
    """The bytes of narrow floats. Kernels know no NaN, which a weight should not have."""
    codes = weight.parts["data"].contiguous().view(torch.uint8)
    if bool(((codes & 0x7F) == 0x7F).any()):
        raise LayoutError(
            f"layout {NAME}", "a weight holds NaN", "numbers", "write the checkpoint again"
        )
    return codes


PANEL = register_layout(Layout(NAME, _fields, _decode))
EDGES = tuple(
    register_edge(Edge(source, NAME, _target, _pack)) for source in ("affine", "lookup", "scaled")
)
