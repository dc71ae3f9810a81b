"""``cuda.p16.DTYPE``: the planar layout that the Triton kernels read.

Comes in: a spec and a shape ``[N, K]``. Goes out: words of 16 bits, scales, zeros or offsets.
Always holds: codes are those of the spec, unchanged; a tile of ``width`` columns and any run of
rows is one run of bytes; padded columns have the code 0 and meet inputs that are 0.

With P planes and W columns a plane (see ``coding``), B blocks, G groups:

``codes``
    int16 ``[B * P * low / 16, N, W]``. Plane p of block b lies at bits ``low * (p % (16 / low))``
    of the word block ``b * P * low / 16 + p // (16 / low)``; its column j is column
    ``(b * P + p) * W + j`` of the weight.
``high``
    int16 ``[B, N, W]``, for codes of 3, 5 and 6 bits: the bits above ``low``, plane p at bits
    ``high * p``.
``scale``
    DTYPE ``[G, N]``.
``zero``, ``offset``
    DTYPE ``[G, N]`` for the forms of those names; a zero is exact.
``columns``
    int32 ``[K]`` for the order *permuted*: place i holds column ``columns[i]``, so that groups run
    in order; kernels gather the input.

>>> import torch
>>> from qcompile.spec import AffineSpec
>>> spec = AffineSpec(bits=8, group=32, form="zero", scale=torch.float16)
>>> words = torch.zeros(1, 1, 16, dtype=torch.int16)
>>> words[0, 0, 0], words[0, 0, 1] = 0x0205, 0x0104
>>> w = QuantizedTensor(spec, "cuda.p16.float16", (1, 32), {
...     "codes": words, "scale": torch.tensor([[0.5]]).half(),
...     "zero": torch.tensor([[3.0]]).half()})
>>> w.dequantize()[0, [0, 1, 2, 16, 17, 18]].tolist()
[1.0, 0.5, -1.5, -0.5, -1.0, -1.5]
"""

from __future__ import annotations

import torch

from qcompile.backends.cuda import planes
from qcompile.backends.cuda.coding import Coding, coding_of
from qcompile.errors import LayoutError
from qcompile.layout import Field, Layout, QuantizedTensor, Shape, register_layout
from qcompile.spec import AffineSpec, Spec

DTYPES = (torch.float16, torch.bfloat16)


def layout_name(dtype: torch.dtype) -> str:
    """The layout for activations of a dtype."""
    return f"cuda.p16.{str(dtype).removeprefix('torch.')}"


def is_permuted(spec: Spec) -> bool:
    """Whether columns are stored in an order of their own."""
    return isinstance(spec, AffineSpec) and spec.order == "permuted"


def coded(spec: Spec, shape: Shape) -> Coding:
    """The coding of a weight. Raises LayoutError where there is none."""
    found = coding_of(spec, shape[-1])
    if isinstance(found, str):
        raise LayoutError("layout cuda.p16", found, "a spec that fits", "choose another layout")
    return found


def groups_of(coding: Coding, columns: int) -> int:
    """Scales of a row."""
    return -(-columns // coding.group) if coding.group else 1


def _fields(dtype: torch.dtype, spec: Spec, shape: Shape) -> tuple[Field, ...]:
    n, k = shape
    coding = coded(spec, shape)
    blocks, groups = coding.blocks(k), groups_of(coding, k)
    fields = [Field("codes", torch.int16, (blocks * coding.words, n, coding.width), axis=1)]
    if coding.high:
        fields.append(Field("high", torch.int16, (blocks, n, coding.width), axis=1))
    fields.append(Field("scale", dtype, (groups, n), axis=1))
    if coding.form != "symmetric":
        fields.append(Field(coding.form, dtype, (groups, n), axis=1))
    if is_permuted(spec):
        fields.append(Field("columns", torch.int32, (k,), rows=0))
    return tuple(fields)


def stored_codes(weight: QuantizedTensor) -> torch.Tensor:
    """The codes uint8 ``[N, K]``, in the stored order of columns."""
    coding = coded(weight.spec, weight.shape)
    return planes.unpack(weight.parts["codes"], weight.parts.get("high"), coding)[
        :, : weight.shape[1]
    ]


def _decode(weight: QuantizedTensor) -> torch.Tensor:
    coding, columns = coded(weight.spec, weight.shape), weight.shape[1]

    def spread(name: str) -> torch.Tensor:
        rows = weight.parts[name].t().float()
        return rows.repeat_interleave(coding.group or columns, dim=1)[:, :columns]

    codes = stored_codes(weight)
    if coding.table:
        plain = torch.tensor(coding.table, dtype=torch.float32)[codes.long()]
    elif coding.kind == "float8":
        plain = codes.contiguous().view(torch.float8_e4m3fn).float()
    else:
        plain = codes.float() - (coding.center if coding.form == "symmetric" else 0)
    if coding.form == "zero":
        plain = plain - spread("zero")
    plain = plain * spread("scale")
    if coding.form == "offset":
        plain = plain + spread("offset")
    if not is_permuted(weight.spec):
        return plain
    return torch.empty_like(plain).index_copy_(1, weight.parts["columns"].long(), plain)


def _layout(dtype: torch.dtype) -> Layout:
    return Layout(layout_name(dtype), lambda spec, shape: _fields(dtype, spec, shape), _decode)


LAYOUTS = {dtype: register_layout(_layout(dtype)) for dtype in DTYPES}
