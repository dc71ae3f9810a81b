"""The layout ``gptq``: codes packed along the input columns, output rows side by side.

Comes in: a weight ``[N, K]`` in words. Goes out: the same weight in ``affine``, and back.
Always holds: both edges are exact; zero points are the true ones, whatever the file stores.

``qweight`` int32 ``[ceil(K * bits / 32), N]``, the bit stream of ``qcompile.schemes.words`` along
the columns; ``scales`` ``[G, N]`` of the spec's dtype; for the form *zero* also ``zeros`` uint8
``[G, N]``; for the orders *permuted* and *indexed* also ``g_idx`` int32 ``[K]``.

>>> from qcompile.layout import layout_of
>>> spec = AffineSpec(bits=4, group=4, form="symmetric", scale=torch.float16)
>>> w = QuantizedTensor(spec, "gptq", (1, 8), {
...     "qweight": torch.tensor([[0x7654321F]], dtype=torch.int32),
...     "scales": torch.tensor([[0.5], [2.0]], dtype=torch.float16)})
>>> w.dequantize().tolist()
[[3.5, -3.5, -3.0, -2.5, -8.0, -6.0, -4.0, -2.0]]
>>> torch.equal(from_affine(to_affine(w)).parts["qweight"], w.parts["qweight"])
True
"""

from __future__ import annotations

import torch

from qcompile.edge import Edge, register_edge
from qcompile.errors import LayoutError
from qcompile.layout import Field, Layout, QuantizedTensor, Shape, layout_of, register_layout
from qcompile.schemes.words import pack_words, unpack_words, words_for
from qcompile.spec import AffineSpec, Spec

NAME = "gptq"


def _fits(spec: Spec) -> Spec | None:
    return spec if isinstance(spec, AffineSpec) and spec.form != "offset" else None


def _fields(spec: Spec, shape: Shape) -> tuple[Field, ...]:
    if not isinstance(spec, AffineSpec) or spec.form == "offset" or len(shape) != 2:
        raise LayoutError(
            f"layout {NAME}",
            f"spec {spec}, shape {shape}",
            "a matrix with integer zero points",
            "keep the weight in its own layout",
        )
    n, k = shape
    groups = -(-k // spec.group)
    fields = [
        Field("qweight", torch.int32, (words_for(k, spec.bits), n), axis=1),
        Field("scales", spec.scale, (groups, n), axis=1),
    ]
    if spec.form == "zero":
        fields.append(Field("zeros", torch.uint8, (groups, n), axis=1))
    if spec.order != "sequential":
        fields.append(Field("g_idx", torch.int32, (k,), rows=0))
    return tuple(fields)


def to_affine(weight: QuantizedTensor) -> QuantizedTensor:
    """Unpack the words: one code a byte, rows first."""
    spec = weight.spec
    assert isinstance(spec, AffineSpec)
    codes = unpack_words(weight.parts["qweight"], spec.bits, 0, weight.shape[1])
    parts = {
        "codes": codes.t().contiguous(),
        "scale": weight.parts["scales"].t().contiguous(),
    }
    if spec.form == "zero":
        parts["zero"] = weight.parts["zeros"].t().to(torch.int32).contiguous()
    if spec.order != "sequential":
        parts["g_idx"] = weight.parts["g_idx"]
    return QuantizedTensor(spec, "affine", weight.shape, parts)


def from_affine(weight: QuantizedTensor) -> QuantizedTensor:
    """Pack the codes again. Zero points have to fit a byte."""
    spec = weight.spec
    assert isinstance(spec, AffineSpec)
    parts = {
        "qweight": pack_words(weight.parts["codes"].t().contiguous(), spec.bits, 0),
        "scales": weight.parts["scale"].t().contiguous(),
    }
    if spec.form == "zero":
        parts["zeros"] = weight.parts["zero"].t().to(torch.uint8).contiguous()
    if spec.order != "sequential":
        parts["g_idx"] = weight.parts["g_idx"]
    return QuantizedTensor(spec, NAME, weight.shape, parts)


def _decode(weight: QuantizedTensor) -> torch.Tensor:
    return layout_of("affine").decode(to_affine(weight))


GPTQ = register_layout(Layout(NAME, _fields, _decode))
TO_AFFINE = register_edge(Edge(NAME, "affine", _fits, to_affine, invert=from_affine))
