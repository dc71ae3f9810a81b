"""The block types of 256 columns whose codes are entries of a codebook, two and three bits.

Comes in: uint8 ``[B, bytes]``. Goes out: Unpacked parts. Always holds: a code is the number of a
magnitude, plus the count of magnitudes when the column's sign bit is set, so the lookup table lists
the magnitudes and then their negatives.

The codebooks (*grids*) are data of the format and come from the gguf package when first needed. A
grid entry spans 8 or 4 columns, column order from low bytes. Where signs have seven bits, the
eighth makes their number even.
"""

from __future__ import annotations

import functools

import torch

from qcompile.schemes.gguf.grids import grid_codes
from qcompile.schemes.gguf.unpacked import Unpacked, field, fields_of, pick, spread

MAGNITUDES_2 = (8, 25, 43)
MAGNITUDES_3_XXS = (4, 12, 20, 28, 36, 44, 52, 62)
MAGNITUDES_3_S = (1, 3, 5, 7, 9, 11, 13, 15)


def iq2_xxs(blocks: torch.Tensor) -> Unpacked:
    """66 bytes: f16 d, then for each group of 32 columns 4 bytes of grid numbers and a u32.

    The u32: [4 x 7] sign bits for 8 columns each, [1 x 4] scale. ``d * (scale + 0.5) / 4 * entry``.

    >>> parts = iq2_xxs(torch.tensor([[0, 0x3C] + [0] * 7 + [0x10] + [0] * 56]).byte())
    >>> parts.codes[0, :8].tolist(), parts.scale[0, :2].tolist()
    ([0, 0, 0, 0, 0, 0, 0, 0], [0.375, 0.125])
    """
    d = field(blocks, 0, 2, torch.float16).float()
    words = field(blocks, 2, 66, torch.int32).view(-1, 8, 2)
    index = field(blocks, 2, 66, torch.uint8).view(-1, 8, 8)[..., :4]
    signs = fields_of(words[..., 1:], (0, 7, 14, 21), 127)
    codes = pick(_grid("IQ2_XXS"), index) + pick(_signs(3, 7), signs)
    scale = d * (((words[..., 1] >> 28) & 15).float() + 0.5) * 0.25
    return Unpacked(_bytes(codes), scale)


def iq2_xs(blocks: torch.Tensor) -> Unpacked:
    """74 bytes: f16 d, 32 u16 (9 bits grid number, 7 sign bits), 8 bytes of scales.

    Scales of groups of 16: low half, then high half of a byte. ``d * (scale + 0.5) / 4 * entry``.

    >>> parts = iq2_xs(torch.tensor([[0, 0x3C] + [0, 2] + [0] * 62 + [0x01] + [0] * 7]).byte())
    >>> parts.codes[0, :8].tolist(), parts.scale[0, :2].tolist()
    ([3, 0, 0, 0, 0, 0, 0, 3], [0.375, 0.125])
    """
    words = field(blocks, 2, 66, torch.int16).int()
    codes = pick(_grid("IQ2_XS"), words & 511) + pick(_signs(3, 7), (words >> 9) & 127)
    return Unpacked(_bytes(codes), _quarter_scales(blocks, 66))


def iq2_s(blocks: torch.Tensor) -> Unpacked:
    """82 bytes: f16 d, 32 bytes of low grid bits, 32 of signs, 8 of high grid bits, 8 of scales.

    High byte i holds bits 8 and 9 of the grid numbers ``4 i + s`` at bits ``2 s``. Scales as in
    ``iq2_xs``. ``d * (scale + 0.5) / 4 * entry``.

    >>> parts = iq2_s(torch.tensor([[0, 0x3C] + [0] * 32 + [1] * 32 + [0] * 16]).byte())
    >>> parts.codes[0, :8].tolist(), parts.scale[0, 0].item()
    ([3, 0, 0, 0, 0, 0, 0, 0], 0.125)
    """
    high = spread(blocks[:, 66:74], 2).int()
    index = blocks[:, 2:34].int() | (high << 8)
    codes = pick(_grid("IQ2_S"), index) + pick(_signs(3, 8), blocks[:, 34:66])
    return Unpacked(_bytes(codes), _quarter_scales(blocks, 74))


def iq3_xxs(blocks: torch.Tensor) -> Unpacked:
    """98 bytes: f16 d, 64 bytes of grid numbers (4 columns each), 8 u32 as in ``iq2_xxs``.

    ``d * (scale + 0.5) / 2 * entry``, groups of 32.

    >>> parts = iq3_xxs(torch.tensor([[0, 0x3C] + [0] * 64 + [1, 0, 0, 0] * 8]).byte())
    >>> parts.codes[0, :8].tolist(), parts.scale[0, 0].item()
    ([8, 0, 0, 0, 0, 0, 0, 8], 0.25)
    """
    d = field(blocks, 0, 2, torch.float16).float()
    words = field(blocks, 66, 98, torch.int32)
    entries = pick(_grid("IQ3_XXS"), blocks[:, 2:66]).view(torch.int64)
    codes = entries + pick(_signs(8, 7), fields_of(words, (0, 7, 14, 21), 127))
    return Unpacked(_bytes(codes), d * (((words >> 28) & 15).float() + 0.5) * 0.5)


def iq3_s(blocks: torch.Tensor) -> Unpacked:
    """110 bytes: f16 d, 64 bytes of low grid bits, 8 of high ones, 32 of signs, 4 of scales.

    Bit s of high byte i is bit 8 of grid number ``8 i + s``. Scales of groups of 32: low half, then
    high half of a byte. ``d * (2 * scale + 1) * entry``.

    >>> parts = iq3_s(torch.tensor([[0, 0x3C] + [0] * 72 + [1] * 32 + [0x21] * 4]).byte())
    >>> parts.codes[0, :8].tolist(), parts.scale[0, :2].tolist()
    ([8, 0, 0, 0, 0, 0, 0, 0], [3.0, 5.0])
    """
    d = field(blocks, 0, 2, torch.float16).float()
    high = spread(blocks[:, 66:74], 1).int()
    entries = pick(_grid("IQ3_S"), blocks[:, 2:66].int() | (high << 8)).view(torch.int64)
    codes = entries + pick(_signs(8, 8), blocks[:, 74:106])
    scales = spread(blocks[:, 106:110], 4)
    return Unpacked(_bytes(codes), d * (2 * scales.float() + 1))


def _quarter_scales(blocks: torch.Tensor, start: int) -> torch.Tensor:
    d = field(blocks, 0, 2, torch.float16).float()
    scales = spread(blocks[:, start : start + 8], 4)
    return d * (scales.float() + 0.5) * 0.25


def _bytes(codes: torch.Tensor) -> torch.Tensor:
    """Eight codes in each int64 as uint8 ``[B, 256]``."""
    return codes.contiguous().view(torch.uint8).view(-1, 256)


@functools.cache
def _grid(name: str) -> torch.Tensor:
    """A codebook whose entries are magnitude numbers, one a byte of an int64 (int32 for 4)."""
    codes = grid_codes(name)
    return codes.view(torch.int64 if codes.shape[1] == 8 else torch.int32).flatten()


@functools.cache
def _signs(step: int, bits: int) -> torch.Tensor:
    """For each sign mask, ``step`` in the bytes of an int64 whose sign bit is set."""
    masks = torch.arange(1 << bits, device="cpu")
    flags = (masks[:, None] >> torch.arange(8, device="cpu")) & 1
    if bits == 7:
        flags[:, 7] = flags[:, :7].sum(dim=1) & 1
    return (flags * step).to(torch.uint8).view(torch.int64).flatten()
