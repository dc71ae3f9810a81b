"""The layouts of AWQ: 4-bit codes, packed along the output rows or along the columns.

Comes in: a weight ``[N, K]`` in words. Goes out: the same weight in the layout ``affine``.
Always holds: the edges are exact; zero points are stored as they are.

``awq`` (version gemm)
    ``qweight`` int32 ``[K, N / 8]``: a word holds eight rows of one column, at bits 0, 4, ... 28
    the rows 0, 2, 4, 6, 1, 3, 5, 7. ``scales`` ``[G, N]``; for the form *zero* also ``zeros``
    uint8 ``[G, N]`` (the file packs them like the rows of a column).

``awq.gemv``
    ``qweight`` int32 ``[N, K / 8]``, eight columns of one row, lowest first; ``scales`` and
    ``zeros`` ``[N, G]``.

>>> w = QuantizedTensor(AffineSpec(4, 1, "symmetric", torch.float16), "awq", (8, 1), {
...     "qweight": torch.tensor([[0x75316420]], dtype=torch.int32),
...     "scales": torch.ones(1, 8, dtype=torch.float16)})
>>> to_affine(w).parts["codes"].flatten().tolist()
[0, 1, 2, 3, 4, 5, 6, 7]
"""

from __future__ import annotations

import torch

from qcompile.edge import Edge, register_edge
from qcompile.errors import LayoutError
from qcompile.layout import Field, Layout, QuantizedTensor, Shape, layout_of, register_layout
from qcompile.schemes.words import unpack_words
from qcompile.spec import AffineSpec, Spec

GEMM, GEMV = "awq", "awq.gemv"
PER_WORD = 8
# Row i of eight is at this place of its word.
_PLACE = (0, 4, 1, 5, 2, 6, 3, 7)


def unpack_rows(words: torch.Tensor) -> torch.Tensor:
    """Codes uint8 ``[*, 8 W]`` of words int32 ``[*, W]``, in the order of the rows."""
    codes = unpack_words(words, 4, 1, words.shape[1] * PER_WORD)
    units = codes.reshape(len(codes), -1, PER_WORD)
    return units[:, :, list(_PLACE)].flatten(1)


def _fits(spec: Spec) -> Spec | None:
    fits = isinstance(spec, AffineSpec) and spec.form != "offset" and spec.order == "sequential"
    return spec if fits and spec.bits == 4 else None  # type: ignore[union-attr]


def _check(layout: str, spec: Spec, shape: Shape) -> AffineSpec:
    packed = shape[0] if layout == GEMM else shape[-1]
    if _fits(spec) is None or len(shape) != 2 or packed % PER_WORD:
        raise LayoutError(
            f"layout {layout}",
            f"spec {spec}, shape {shape}",
            f"4-bit codes with integer zero points, {PER_WORD} of them in every word",
            "keep the weight in its own layout",
        )
    assert isinstance(spec, AffineSpec)
    return spec


def _gemm_fields(spec: Spec, shape: Shape) -> tuple[Field, ...]:
    affine, (n, k) = _check(GEMM, spec, shape), shape
    groups = -(-k // affine.group)
    fields = (
        Field("qweight", torch.int32, (k, n // PER_WORD), rows=PER_WORD, axis=1),
        Field("scales", affine.scale, (groups, n), axis=1),
    )
    zeros = Field("zeros", torch.uint8, (groups, n), axis=1)
    return (*fields, zeros) if affine.form == "zero" else fields


def _gemv_fields(spec: Spec, shape: Shape) -> tuple[Field, ...]:
    affine, (n, k) = _check(GEMV, spec, shape), shape
    groups = -(-k // affine.group)
    fields = (
        Field("qweight", torch.int32, (n, k // PER_WORD)),
        Field("scales", affine.scale, (n, groups)),
    )
    zeros = Field("zeros", torch.uint8, (n, groups))
    return (*fields, zeros) if affine.form == "zero" else fields


def to_affine(weight: QuantizedTensor) -> QuantizedTensor:
    """Unpack the words of either layout: one code a byte, rows first."""
    rows_first = weight.layout == GEMV
    words = weight.parts["qweight"]
    codes = unpack_words(words, 4, 1, weight.shape[1]) if rows_first else unpack_rows(words)

    def turned(part: torch.Tensor) -> torch.Tensor:
        return (part if rows_first else part.t()).contiguous()

    parts = {"codes": turned(codes), "scale": turned(weight.parts["scales"])}
    if "zeros" in weight.parts:
        parts["zero"] = turned(weight.parts["zeros"]).to(torch.int32)
    return QuantizedTensor(weight.spec, "affine", weight.shape, parts)


def _decode(weight: QuantizedTensor) -> torch.Tensor:
    return layout_of("affine").decode(to_affine(weight))


LAYOUTS = (
    register_layout(Layout(GEMM, _gemm_fields, _decode)),
    register_layout(Layout(GEMV, _gemv_fields, _decode)),
)
EDGES = tuple(register_edge(Edge(name, "affine", _fits, to_affine)) for name in (GEMM, GEMV))
