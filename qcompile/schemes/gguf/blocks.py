"""The weights a GGUF tensor can be: one spec and one layout for each type.

Comes in: a type's name, or a weight in a ``gguf.*`` layout. Goes out: its spec, or its float32
values. Always holds: the values are those of ggml's own decoder bit for bit, and ``exact`` of a
spec describes the same values in the frame's words.

The layout ``gguf.<type>`` has one part, ``data`` uint8 ``[..., N, K / elements * bytes]``: the
blocks of a row side by side, as the file has them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from qcompile.errors import LayoutError
from qcompile.layout import Field, Layout, QuantizedTensor, Shape, register_layout
from qcompile.schemes.gguf import decode_fp4 as fp4
from qcompile.schemes.gguf import decode_iq as iq
from qcompile.schemes.gguf import decode_iq1 as iq1
from qcompile.schemes.gguf import decode_k as k
from qcompile.schemes.gguf import decode_legacy as legacy
from qcompile.schemes.gguf import decode_ternary as ternary
from qcompile.schemes.gguf.type_table import BY_NAME
from qcompile.schemes.gguf.unpacked import Unpacked, pick
from qcompile.spec import AffineForm, AffineSpec, BlockSpec, FloatSpec, LookupSpec, Spec

Unpack = Callable[[torch.Tensor], Unpacked]

# The ternary types store -1, 0, 1 as 0, 1, 2.
TERNARY_ZERO = 1


@dataclass(frozen=True)
class BlockType:
    """A quantized type.

    Attributes:
        spec: name, sizes and the exact affine or lookup spec.
        exact: that affine or lookup spec.
        unpack: blocks uint8 ``[B, bytes]`` to codes, scales and offsets.
        decode: blocks to float32 ``[B, elements]`` where the parts alone do not give ggml's values
            for an infinite scale.
    """

    spec: BlockSpec
    exact: AffineSpec | LookupSpec
    unpack: Unpack
    decode: Callable[[torch.Tensor], torch.Tensor] | None = None


def _affine(bits: int, group: int, form: AffineForm, *, stored: bool) -> AffineSpec:
    """An affine spec whose scales are the file's float16, or products of them."""
    return AffineSpec(bits, group, form, torch.float16 if stored else torch.float32)


def _signed(magnitudes: tuple[int, ...]) -> tuple[int, ...]:
    return (*magnitudes, *(-value for value in magnitudes))


_TWO_BIT = _signed(iq.MAGNITUDES_2)
_EXACT: dict[str, tuple[AffineSpec | LookupSpec, Unpack]] = {
    "q4_0": (_affine(4, 32, "symmetric", stored=True), legacy.q4_0),
    "q4_1": (_affine(4, 32, "offset", stored=True), legacy.q4_1),
    "q5_0": (_affine(5, 32, "symmetric", stored=True), legacy.q5_0),
    "q5_1": (_affine(5, 32, "offset", stored=True), legacy.q5_1),
    "q8_0": (_affine(8, 32, "symmetric", stored=True), legacy.q8_0),
    "q1_0": (_affine(2, 128, "symmetric", stored=True), legacy.q1_0),
    "q2_0": (_affine(2, 64, "zero", stored=True), legacy.q2_0),
    "q2_k": (_affine(2, 16, "offset", stored=False), k.q2_k),
    "q3_k": (_affine(3, 16, "symmetric", stored=False), k.q3_k),
    "q4_k": (_affine(4, 32, "offset", stored=False), k.q4_k),
    "q5_k": (_affine(5, 32, "offset", stored=False), k.q5_k),
    "q6_k": (_affine(6, 16, "symmetric", stored=False), k.q6_k),
    "tq1_0": (_affine(2, 256, "zero", stored=True), ternary.tq1_0),
    "tq2_0": (_affine(2, 256, "zero", stored=True), ternary.tq2_0),
    "iq1_s": (_affine(2, 32, "offset", stored=False), iq1.iq1_s),
    "iq1_m": (_affine(2, 8, "offset", stored=False), iq1.iq1_m),
    "iq2_xxs": (LookupSpec(3, 32, _TWO_BIT), iq.iq2_xxs),
    "iq2_xs": (LookupSpec(3, 16, _TWO_BIT), iq.iq2_xs),
    "iq2_s": (LookupSpec(3, 16, _TWO_BIT), iq.iq2_s),
    "iq3_xxs": (LookupSpec(4, 32, _signed(iq.MAGNITUDES_3_XXS)), iq.iq3_xxs),
    "iq3_s": (LookupSpec(4, 32, _signed(iq.MAGNITUDES_3_S)), iq.iq3_s),
    "iq4_nl": (LookupSpec(4, 32, fp4.IQ4, torch.float16), fp4.iq4_nl),
    "iq4_xs": (LookupSpec(4, 32, fp4.IQ4), fp4.iq4_xs),
    "mxfp4": (LookupSpec(4, 32, fp4.E2M1_TWICE), fp4.mxfp4),
    "nvfp4": (LookupSpec(4, 16, fp4.E2M1_TWICE), fp4.nvfp4),
}
_OWN_DECODERS = {"iq1_s": iq1.iq1_s_values, "iq1_m": iq1.iq1_m_values}


def _block_type(name: str) -> BlockType:
    exact, unpack = _EXACT[name]
    size = BY_NAME[name]
    spec = BlockSpec(name, size.elements, size.bytes, exact)
    return BlockType(spec, exact, unpack, _OWN_DECODERS.get(name))


BLOCKS = {name: _block_type(name) for name in _EXACT}
SPECS: dict[str, Spec] = {
    "f32": FloatSpec(torch.float32),
    "f16": FloatSpec(torch.float16),
    "bf16": FloatSpec(torch.bfloat16),
    **{name: block.spec for name, block in BLOCKS.items()},
}


def layout_name(spec: Spec) -> str:
    """The layout in which a file holds a weight of this spec.

    >>> layout_name(SPECS["q4_k"]), layout_name(SPECS["f16"])
    ('gguf.q4_k', 'float')
    """
    return f"gguf.{spec.type}" if isinstance(spec, BlockSpec) else "float"


def decode_blocks(name: str, data: torch.Tensor) -> torch.Tensor:
    """Float32 values of rows of blocks.

    Args:
        name: a quantized type, for instance ``q4_k``.
        data: uint8 ``[..., K / elements * bytes]``.

    Returns:
        float32 ``[..., K]``, with the zeros' signs as ggml has them.
    """
    block = BLOCKS[name]
    flat = data.reshape(-1, block.spec.bytes)
    values = block.decode(flat) if block.decode else _values(block.exact, block.unpack(flat))
    columns = data.shape[-1] // block.spec.bytes * block.spec.elements
    return values.reshape(*data.shape[:-1], columns)


def _values(spec: AffineSpec | LookupSpec, parts: Unpacked) -> torch.Tensor:
    scale = parts.scale.float()[..., None]
    codes = parts.codes.view(*parts.scale.shape, spec.group)
    if isinstance(spec, LookupSpec):
        table = torch.tensor(spec.table, dtype=torch.float32, device=codes.device)
        return pick(table, codes).mul_(scale).flatten(1)
    if parts.offset is not None:
        return codes.float().mul_(scale).add_(parts.offset[..., None]).flatten(1)
    middle = TERNARY_ZERO if spec.form == "zero" else 1 << (spec.bits - 1)
    return codes.float().sub_(middle).mul_(scale).flatten(1)


def _layout_of(block: BlockType) -> Layout:
    size = block.spec

    def fields(spec: Spec, shape: Shape) -> tuple[Field, ...]:
        if spec != size:
            raise LayoutError(
                f"layout gguf.{size.type}", f"spec {spec}", f"{size}", "use the spec's own layout"
            )
        if len(shape) < 2 or shape[-1] % size.elements:
            raise LayoutError(
                f"layout gguf.{size.type}",
                f"shape {shape}",
                f"rows of a multiple of {size.elements} columns",
                "keep the weight in a layout that fits its shape",
            )
        row = shape[-1] // size.elements * size.bytes
        return (Field("data", torch.uint8, (*shape[:-1], row)),)

    def decode(weight: QuantizedTensor) -> torch.Tensor:
        return decode_blocks(size.type, weight.parts["data"]).reshape(weight.shape)

    return Layout(f"gguf.{size.type}", fields, decode)


for _block in BLOCKS.values():
    register_layout(_layout_of(_block))
