"""The K block types: 256 columns with quantized scales of their groups.

Comes in: uint8 ``[B, bytes]``. Goes out: Unpacked parts. Always holds: a group's scale is a float16
times a small integer, which float32 holds exactly.

``f16`` is an IEEE half, little endian; a run of bit fields is written ``[count x bits]``.
"""

from __future__ import annotations

import torch

from qcompile.schemes.gguf.unpacked import Unpacked, field, shifted

_EIGHT_BITS = (0, 1, 2, 3, 4, 5, 6, 7)
_FOUR_PAIRS = (0, 2, 4, 6)


def q2_k(blocks: torch.Tensor) -> Unpacked:
    """84 bytes: 16 bytes of group scales, 64 of codes, f16 d, f16 dmin. Groups of 16.

    Byte g holds scale (low four bits) and minimum (high four) of group g. Code byte ``32 h + j``
    holds columns ``128 h + j + 32 s`` at bits ``2 s``. ``d * scale * code - dmin * minimum``.

    >>> block = torch.tensor([[0x32] * 16 + [0b11_10_01_00] * 64 + [0, 0x3C] * 2]).byte()
    >>> parts = q2_k(block)
    >>> parts.codes[0, [0, 32, 64, 96]].tolist(), parts.scale[0, 0], parts.offset[0, 0]
    ([0, 1, 2, 3], tensor(2.), tensor(-3.))
    """
    d = field(blocks, 80, 84, torch.float16).float()
    packed = blocks[:, :16]
    codes = shifted(blocks[:, 16:80].view(-1, 2, 32), _FOUR_PAIRS, 3).flatten(1)
    return Unpacked(codes, d[:, :1] * (packed & 15), -(d[:, 1:] * (packed >> 4)))


def q3_k(blocks: torch.Tensor) -> Unpacked:
    """110 bytes: 32 bytes of high bits, 64 of low codes, 12 of group scales, f16 d. Groups of 16.

    Bit i of high byte j is the third bit of column ``32 i + j``; low codes as in ``q2_k``. Scale g
    has its low four bits in byte ``g % 8`` (high half for g >= 8) and its high two in byte
    ``8 + g % 4`` at bits ``2 (g // 4)``. ``d * (scale - 32) * (code - 4)``.

    >>> block = torch.tensor([[1] * 32 + [0b01] * 64 + [0x11] * 8 + [0xAA] * 4 + [0, 0x3C]]).byte()
    >>> parts = q3_k(block)
    >>> parts.codes[0, [0, 32, 128]].tolist(), parts.scale[0, 0].item()
    ([5, 0, 1], 1.0)
    """
    d = field(blocks, 108, 110, torch.float16).float()
    codes = shifted(blocks[:, 32:96].view(-1, 2, 32), _FOUR_PAIRS, 3).flatten(1)
    high = shifted(blocks[:, :32], _EIGHT_BITS, 1).flatten(1)
    codes.bitwise_or_(high.bitwise_left_shift_(2))
    low = shifted(blocks[:, 96:104], (0, 4), 15).flatten(1)
    top = shifted(blocks[:, 104:108], _FOUR_PAIRS, 3).flatten(1)
    return Unpacked(codes, d * ((low | (top << 4)).float() - 32))


def q4_k(blocks: torch.Tensor) -> Unpacked:
    """144 bytes: f16 d, f16 dmin, 12 bytes of group scales, 128 of codes. Groups of 32.

    Code byte ``32 h + j`` holds columns ``64 h + j`` (low four bits) and ``64 h + 32 + j``. For the
    12 bytes see ``_scales_and_minimums``. ``d * scale * code - dmin * minimum``.

    >>> block = torch.tensor([[0, 0x3C] * 2 + [2] * 4 + [3] * 4 + [0x54] * 4 + [0x9A] * 128]).byte()
    >>> parts = q4_k(block)
    >>> parts.codes[0, [0, 32]].tolist(), parts.scale[0, [0, 4]].tolist()
    ([10, 9], [2.0, 4.0])
    >>> parts.offset[0, [0, 4]].tolist()
    [-3.0, -5.0]
    """
    scale, offset = _scales_and_minimums(blocks)
    codes = shifted(blocks[:, 16:].view(-1, 4, 32), (0, 4), 15).flatten(1)
    return Unpacked(codes, scale, offset)


def q5_k(blocks: torch.Tensor) -> Unpacked:
    """176 bytes: f16 d, f16 dmin, 12 bytes of scales, 32 of high bits, 128 of low codes.

    As ``q4_k``; bit g of high byte j is the fifth bit of column ``32 g + j``.

    >>> block = torch.tensor([[0, 0x3C] * 2 + [2] * 12 + [2] * 32 + [0x9A] * 128]).byte()
    >>> q5_k(block).codes[0, [0, 32, 64]].tolist()
    [10, 25, 10]
    """
    scale, offset = _scales_and_minimums(blocks)
    codes = shifted(blocks[:, 48:].view(-1, 4, 32), (0, 4), 15).flatten(1)
    high = shifted(blocks[:, 16:48], _EIGHT_BITS, 1).flatten(1)
    return Unpacked(codes.bitwise_or_(high.bitwise_left_shift_(4)), scale, offset)


def q6_k(blocks: torch.Tensor) -> Unpacked:
    """210 bytes: 128 bytes of low codes, 64 of high bits, 16 signed group scales, f16 d.

    Low byte ``64 h + j`` holds columns ``128 h + j`` (low four bits) and ``128 h + 64 + j``; high
    byte ``32 h + j`` holds bits 4 and 5 of columns ``128 h + j + 32 s`` at bits ``2 s``. Groups of
    16. ``d * scale * (code - 32)``.

    >>> block = torch.tensor([[0x9A] * 128 + [0b10] * 64 + [255] * 16 + [0, 0x3C]]).byte()
    >>> parts = q6_k(block)
    >>> parts.codes[0, [0, 32, 64]].tolist(), parts.scale[0, 0].item()
    ([42, 10, 9], -1.0)
    """
    d = field(blocks, 208, 210, torch.float16).float()
    codes = shifted(blocks[:, :128].view(-1, 2, 64), (0, 4), 15).flatten(1)
    high = shifted(blocks[:, 128:192].view(-1, 2, 32), _FOUR_PAIRS, 3).flatten(1)
    codes.bitwise_or_(high.bitwise_left_shift_(4))
    return Unpacked(codes, d * field(blocks, 192, 208, torch.int8))


def _scales_and_minimums(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and offsets of ``q4_k`` and ``q5_k``, float32 ``[B, 8]`` each.

    Six-bit numbers in 12 bytes: scale g < 4 is the low six bits of byte g, minimum g < 4 those of
    byte ``4 + g``; for g >= 4 their low four bits are the halves of byte ``4 + g`` and their high
    two bits the high bits of bytes ``g - 4`` and ``g``.
    """
    d = field(blocks, 0, 4, torch.float16).float()
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scale = torch.cat([first & 63, (third & 15) | ((first >> 2) & 48)], dim=1)
    minimum = torch.cat([second & 63, (third >> 4) | ((second >> 2) & 48)], dim=1)
    return d[:, :1] * scale, -(d[:, 1:] * minimum)
