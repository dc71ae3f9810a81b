"""The layouts of compressed-tensors.

Comes in: a weight ``[N, K]`` as the files hold it. Goes out: the same weight in ``affine`` or
``lookup``.
Always holds: the edges are exact. The files hold signed codes plus ``2**(bits - 1)``, so the codes
of a word are unsigned already; zero points are made so when they are read.

``ct.packed``
    ``packed`` int32 ``[N, ceil(K * bits / 32)]``, the bit stream of ``qcompile.schemes.words``.
``ct.padded``
    ``packed`` int32 ``[N, ceil(K / (32 // bits))]``: ``32 // bits`` codes a word, lowest first, the
    rest of the word unused. Older releases wrote 3, 5, 6 and 7 bits so.
``ct.int8``
    ``weight`` int8 ``[N, K]``, codes minus ``2**(bits - 1)``.

These three also have ``scale`` ``[N, G]``; for the form *zero* ``zeros`` uint8 ``[N, G]``; for the
orders *permuted* and *indexed* ``g_idx`` int32 ``[K]``.

``ct.nvfp4``
    ``packed`` uint8 ``[N, K / 2]``, two codes of FP4 (E2M1) a byte, the lower one first; ``scale``
    float8_e4m3fn ``[N, K / 16]``; ``global`` float32 ``[1]``. A scale is ``scale / global``.
``ct.mxfp4``
    ``packed`` as above; ``scale`` uint8 ``[N, K / 32]``: ``2 ** (scale - 127)``.

The table of a lookup has to hold integers, so it holds the values of E2M1 doubled and the scale is
halved, which is exact.

>>> spec = LookupSpec(4, 32, E2M1_DOUBLED)
>>> w = QuantizedTensor(spec, "ct.mxfp4", (1, 4), {
...     "packed": torch.tensor([[0x21, 0xF7]], dtype=torch.uint8),
...     "scale": torch.tensor([[128]], dtype=torch.uint8)})
>>> w.dequantize().tolist()
[[1.0, 2.0, 12.0, -12.0]]
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from qcompile.edge import Edge, register_edge
from qcompile.errors import LayoutError
from qcompile.layout import Field, Layout, QuantizedTensor, Shape, layout_of, register_layout
from qcompile.schemes.words import unpack_words, words_for
from qcompile.spec import AffineSpec, LookupSpec, Spec

E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)

Unpack = Callable[[QuantizedTensor, int], torch.Tensor]


def per_word(bits: int) -> int:
    """Codes in a word of ``ct.padded``."""
    return 32 // bits


# **** integers ****


def _affine(spec: Spec) -> Spec | None:
    return spec if isinstance(spec, AffineSpec) and spec.form != "offset" else None


def _affine_fields(name: str, codes: Callable[[AffineSpec, int, int], Field]) -> Layout:
    def fields(spec: Spec, shape: Shape) -> tuple[Field, ...]:
        if not isinstance(spec, AffineSpec) or spec.form == "offset" or len(shape) != 2:
            raise _misfit(name, spec, shape, "a matrix with integer zero points")
        n, k = shape
        groups = -(-k // spec.group)
        found = [codes(spec, n, k), Field("scale", spec.scale, (n, groups))]
        if spec.form == "zero":
            found.append(Field("zeros", torch.uint8, (n, groups)))
        if spec.order != "sequential":
            found.append(Field("g_idx", torch.int32, (k,), rows=0))
        return tuple(found)

    return Layout(name, fields, _decode)


def _to_affine(unpack: Unpack) -> Callable[[QuantizedTensor], QuantizedTensor]:
    def apply(weight: QuantizedTensor) -> QuantizedTensor:
        spec = weight.spec
        assert isinstance(spec, AffineSpec)
        parts = {
            "codes": unpack(weight, spec.bits).contiguous(),
            "scale": weight.parts["scale"].contiguous(),
        }
        if spec.form == "zero":
            parts["zero"] = weight.parts["zeros"].to(torch.int32)
        if spec.order != "sequential":
            parts["g_idx"] = weight.parts["g_idx"]
        return QuantizedTensor(spec, "affine", weight.shape, parts)

    return apply


def _packed(weight: QuantizedTensor, bits: int) -> torch.Tensor:
    return unpack_words(weight.parts["packed"], bits, 1, weight.shape[1])


def _padded(weight: QuantizedTensor, bits: int) -> torch.Tensor:
    return unpack_padded(weight.parts["packed"], bits, 1, weight.shape[1])


def _int8(weight: QuantizedTensor, bits: int) -> torch.Tensor:
    return (weight.parts["weight"].to(torch.int16) + (1 << (bits - 1))).to(torch.uint8)


def unpack_padded(words: torch.Tensor, bits: int, dim: int, count: int) -> torch.Tensor:
    """Codes uint8 of words with ``32 // bits`` codes each; ``count`` of them along ``dim``."""
    mask = (1 << bits) - 1
    fields = [(words >> (bits * place)) & mask for place in range(per_word(bits))]
    return torch.stack(fields, dim + 1).flatten(dim, dim + 1).narrow(dim, 0, count).to(torch.uint8)


# **** floats of four bits ****


def _lookup(spec: Spec) -> Spec | None:
    fits = isinstance(spec, LookupSpec) and spec.table == E2M1_DOUBLED
    return spec if fits else None


def _fp4_fields(name: str, scale: torch.dtype, shared: tuple[Field, ...]) -> Layout:
    def fields(spec: Spec, shape: Shape) -> tuple[Field, ...]:
        if _lookup(spec) is None or len(shape) != 2 or shape[1] % 2:
            raise _misfit(name, spec, shape, "a matrix of E2M1 values, an even number of columns")
        assert isinstance(spec, LookupSpec)
        n, k = shape
        return (
            Field("packed", torch.uint8, (n, k // 2)),
            Field("scale", scale, (n, -(-k // spec.group))),
            *shared,
        )

    return Layout(name, fields, _decode)


def _nvfp4(weight: QuantizedTensor) -> QuantizedTensor:
    scale = weight.parts["scale"].to(torch.float32) / weight.parts["global"]
    return _as_lookup(weight, scale)


def _mxfp4(weight: QuantizedTensor) -> QuantizedTensor:
    exponent = weight.parts["scale"].to(torch.int32) - 127
    scale = torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent).float()
    # The largest byte stands for no number.
    return _as_lookup(weight, torch.where(exponent == 128, torch.nan, scale))


def _as_lookup(weight: QuantizedTensor, scale: torch.Tensor) -> QuantizedTensor:
    packed = weight.parts["packed"]
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(1)
    parts = {"codes": codes, "scale": scale * 0.5}
    return QuantizedTensor(weight.spec, "lookup", weight.shape, parts)


# **** registration ****


def _decode(weight: QuantizedTensor) -> torch.Tensor:
    unpacked = _EDGES[weight.layout].apply(weight)
    return layout_of(unpacked.layout).decode(unpacked)


def _misfit(name: str, spec: Spec, shape: Shape, needed: str) -> LayoutError:
    return LayoutError(
        f"layout {name}", f"spec {spec}, shape {shape}", needed, "keep the weight in its own layout"
    )


for _layout in (
    _affine_fields(
        "ct.packed", lambda s, n, k: Field("packed", torch.int32, (n, words_for(k, s.bits)))
    ),
    _affine_fields(
        "ct.padded", lambda s, n, k: Field("packed", torch.int32, (n, -(-k // per_word(s.bits))))
    ),
    _affine_fields("ct.int8", lambda s, n, k: Field("weight", torch.int8, (n, k))),
    _fp4_fields("ct.nvfp4", torch.float8_e4m3fn, (Field("global", torch.float32, (1,), rows=0),)),
    _fp4_fields("ct.mxfp4", torch.uint8, ()),
):
    register_layout(_layout)

_EDGES = {
    edge.source: register_edge(edge)
    for edge in (
        Edge("ct.packed", "affine", _affine, _to_affine(_packed)),
        Edge("ct.padded", "affine", _affine, _to_affine(_padded)),
        Edge("ct.int8", "affine", _affine, _to_affine(_int8)),
        Edge("ct.nvfp4", "lookup", _lookup, _nvfp4),
        Edge("ct.mxfp4", "lookup", _lookup, _mxfp4),
    )
}
