"""The block types with one scale for 32 (64, 128) columns.

Comes in: uint8 ``[B, bytes]``. Goes out: Unpacked parts. Always holds: the scale is the stored
float16, untouched.

``f16`` is an IEEE half, little endian. Half a block shares a byte: column j has the low four bits
of byte j, column j + 16 the high four.
"""

from __future__ import annotations

import torch

from qcompile.schemes.gguf.unpacked import Unpacked, field, shifted, spread


def q4_0(blocks: torch.Tensor) -> Unpacked:
    """18 bytes, 32 columns: f16 d, 16 bytes of codes. ``d * (code - 8)``.

    >>> block = torch.tensor([[0, 0x38] + [0x9A] * 16], dtype=torch.uint8)
    >>> parts = q4_0(block)
    >>> parts.codes[0, [0, 16]].tolist(), parts.scale.tolist()
    ([10, 9], [[0.5]])
    """
    return Unpacked(_nibbles(blocks[:, 2:]), field(blocks, 0, 2, torch.float16))


def q4_1(blocks: torch.Tensor) -> Unpacked:
    """20 bytes, 32 columns: f16 d, f16 m, 16 bytes of codes. ``d * code + m``.

    >>> block = torch.tensor([[0, 0x38, 0, 0xBC] + [0x9A] * 16], dtype=torch.uint8)
    >>> parts = q4_1(block)
    >>> parts.codes[0, [0, 16]].tolist(), parts.scale.tolist(), parts.offset.tolist()
    ([10, 9], [[0.5]], [[-1.0]])
    """
    head = field(blocks, 0, 4, torch.float16)
    return Unpacked(_nibbles(blocks[:, 4:]), head[:, :1], head[:, 1:].float())


def q5_0(blocks: torch.Tensor) -> Unpacked:
    """22 bytes, 32 columns: f16 d, 4 bytes of high bits, 16 bytes of low codes.

    Bit j of the 32 high bits (little endian) is the fifth bit of column j. ``d * (code - 16)``.

    >>> block = torch.tensor([[0, 0x38, 1, 0, 0, 0] + [0x9A] * 16], dtype=torch.uint8)
    >>> q5_0(block).codes[0, [0, 1, 16]].tolist()
    [26, 10, 9]
    """
    codes = _nibbles(blocks[:, 6:]).bitwise_or_(spread(blocks[:, 2:6], 1, 16))
    return Unpacked(codes, field(blocks, 0, 2, torch.float16))


def q5_1(blocks: torch.Tensor) -> Unpacked:
    """24 bytes, 32 columns: f16 d, f16 m, 4 bytes of high bits, 16 bytes of low codes.

    ``d * code + m``; high bits as in ``q5_0``.

    >>> block = torch.tensor([[0, 0x38, 0, 0xBC, 0, 0, 1, 0] + [0x9A] * 16], dtype=torch.uint8)
    >>> parts = q5_1(block)
    >>> parts.codes[0, [0, 16]].tolist(), parts.offset.tolist()
    ([10, 25], [[-1.0]])
    """
    codes = _nibbles(blocks[:, 8:]).bitwise_or_(spread(blocks[:, 4:8], 1, 16))
    head = field(blocks, 0, 4, torch.float16)
    return Unpacked(codes, head[:, :1], head[:, 1:].float())


def q8_0(blocks: torch.Tensor) -> Unpacked:
    """34 bytes, 32 columns: f16 d, 32 signed bytes. ``d * byte``, with ``code = byte + 128``.

    >>> block = torch.tensor([[0, 0x38, 0xFF] + [0] * 31], dtype=torch.uint8)
    >>> q8_0(block).codes[0, :2].tolist()
    [127, 128]
    """
    # Adding 128 to a signed byte flips its sign bit.
    return Unpacked(blocks[:, 2:].bitwise_xor(0x80), field(blocks, 0, 2, torch.float16))


def q1_0(blocks: torch.Tensor) -> Unpacked:
    """18 bytes, 128 columns: f16 d, 16 bytes of bits, low bit first. ``d`` if the bit, else ``-d``.

    As two-bit symmetric codes the bit 0 is 1 and the bit 1 is 3: ``d * (code - 2)``.

    >>> block = torch.tensor([[0, 0x38, 0b01] + [0] * 15], dtype=torch.uint8)
    >>> q1_0(block).codes[0, :3].tolist()
    [3, 1, 1]
    """
    return Unpacked(spread(blocks[:, 2:], 1, 2).add_(1), field(blocks, 0, 2, torch.float16))


def q2_0(blocks: torch.Tensor) -> Unpacked:
    """18 bytes, 64 columns: f16 d, 16 bytes of codes, low bits first. ``d * (code - 1)``.

    >>> block = torch.tensor([[0, 0x38, 0b11_10_01_00] + [0] * 15], dtype=torch.uint8)
    >>> q2_0(block).codes[0, :5].tolist()
    [0, 1, 2, 3, 0]
    """
    return Unpacked(spread(blocks[:, 2:], 2), field(blocks, 0, 2, torch.float16))


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    return shifted(packed, (0, 4), 15).flatten(-2)
