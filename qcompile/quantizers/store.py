"""The layout ``words``: affine weights as they wait in memory.

Comes in: a weight in the layout ``affine``. Goes out: the same in ``words``, and back, exactly.
Always holds: codes take ``bits`` bits each but for the end of a row.

``words`` int32 ``[N, ceil(K * bits / 32)]`` as in ``qcompile.schemes.words``, packed along the
columns; ``scale`` ``[N, G]``; ``zero`` uint8 ``[N, G]`` for the form *zero*; ``g_idx`` int32
``[K]`` for the orders that store it.

>>> w = to_words(QuantizedTensor(AffineSpec(4, 8, "symmetric", torch.float16), "affine", (1, 8), {
...     "codes": torch.arange(8, dtype=torch.uint8)[None],
...     "scale": torch.ones(1, 1, dtype=torch.float16)}))
>>> f"{w.parts['words'].item():x}", w.dequantize().tolist()
('76543210', [[-8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0]])
"""

from __future__ import annotations

import torch

from qcompile.edge import Edge, register_edge
from qcompile.errors import LayoutError
from qcompile.layout import Field, Layout, QuantizedTensor, Shape, register_layout
from qcompile.schemes.words import pack_words, unpack_words, words_for
from qcompile.spec import AffineSpec, Spec

NAME = "words"


def _target(spec: Spec) -> Spec | None:
    return spec if isinstance(spec, AffineSpec) and spec.form != "offset" else None


def _fields(spec: Spec, shape: Shape) -> tuple[Field, ...]:
    if not isinstance(spec, AffineSpec) or _target(spec) is None or len(shape) != 2:
        raise LayoutError(
            f"layout {NAME}",
            f"spec {spec}, shape {shape}",
            "an affine matrix whose zeros are integers",
            "take another layout",
        )
    n, k = shape
    groups = -(-k // spec.group)
    fields = [
        Field("words", torch.int32, (n, words_for(k, spec.bits))),
        Field("scale", spec.scale, (n, groups)),
    ]
    if spec.form == "zero":
        fields.append(Field("zero", torch.uint8, (n, groups)))
    if spec.order != "sequential":
        fields.append(Field("g_idx", torch.int32, (k,), rows=0))
    return tuple(fields)


def to_words(weight: QuantizedTensor) -> QuantizedTensor:
    """A weight in the layout ``affine`` as ``words``."""
    assert isinstance(weight.spec, AffineSpec)
    parts = dict(weight.parts)
    parts["words"] = pack_words(parts.pop("codes"), weight.spec.bits, 1)
    if "zero" in parts:
        parts["zero"] = parts["zero"].to(torch.uint8)
    return QuantizedTensor(weight.spec, NAME, weight.shape, parts)


def from_words(weight: QuantizedTensor) -> QuantizedTensor:
    """A weight in the layout ``words`` as ``affine``."""
    assert isinstance(weight.spec, AffineSpec)
    parts = dict(weight.parts)
    parts["codes"] = unpack_words(parts.pop("words"), weight.spec.bits, 1, weight.shape[1])
    if "zero" in parts:
        parts["zero"] = parts["zero"].to(torch.int32)
    return QuantizedTensor(weight.spec, "affine", weight.shape, parts)


WORDS = register_layout(Layout(NAME, _fields, lambda weight: from_words(weight).dequantize()))
EDGE = register_edge(Edge(NAME, "affine", _target, from_words, invert=to_words))
