"""The four-bit floating types, and the four-bit types with a table of sixteen values.

Comes in: uint8 ``[B, bytes]``. Goes out: Unpacked parts whose codes index a table of integers.
Always holds: a factor that all table entries share is part of the scale.
"""

from __future__ import annotations

import functools

import torch

from qcompile.schemes.gguf.unpacked import Unpacked, field, pick, shifted, spread

# E2M1 (sign, two bits of exponent, one of mantissa) times two. Source: OCP MX specification 1.0.
E2M1_TWICE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def mxfp4(blocks: torch.Tensor) -> Unpacked:
    """17 bytes, 32 columns: E8M0 exponent e, 16 bytes of codes. ``2**(e - 128) * table[code]``.

    Column j has the low four bits of byte j, column j + 16 the high four.

    >>> parts = mxfp4(torch.tensor([[127] + [0xF7] * 16], dtype=torch.uint8))
    >>> parts.codes[0, [0, 16]].tolist(), parts.scale.tolist()
    ([7, 15], [[0.5]])
    """
    scale = pick(_half_e8m0(), blocks[:, :1])
    return Unpacked(shifted(blocks[:, 1:], (0, 4), 15).flatten(1), scale)


@functools.cache
def _half_e8m0() -> torch.Tensor:
    exponents = torch.arange(256, dtype=torch.float64, device="cpu") - 128
    return torch.exp2(exponents).to(torch.float32)


def nvfp4(blocks: torch.Tensor) -> Unpacked:
    """36 bytes, 64 columns: 4 UE4M3 scales, 4 times 8 bytes of codes. Groups of 16.

    In a group column j has the low four bits of byte j, column j + 8 the high four.
    ``scale / 2 * table[code]``.

    >>> parts = nvfp4(torch.tensor([[0x38] * 4 + [0xF7] * 32], dtype=torch.uint8))
    >>> parts.codes[0, [0, 8]].tolist(), parts.scale[0, 0].item()
    ([7, 15], 0.5)
    """
    codes = shifted(blocks[:, 4:].view(-1, 4, 8), (0, 4), 15).flatten(1)
    return Unpacked(codes, pick(_half_ue4m3(), blocks[:, :4]))


@functools.cache
def _half_ue4m3() -> torch.Tensor:
    """Half the value of a byte as E4M3 with bias 7, whose sign bit is ignored, float32 ``[256]``.

    The byte 0x7F counts as zero; 0xFF does not, there the bits are taken as a number.
    """
    byte = torch.arange(256, dtype=torch.float64, device="cpu")
    exponent, mantissa = (byte // 8) % 16, byte % 8
    small = mantissa * 2.0**-9
    large = (1 + mantissa / 8) * torch.exp2(exponent - 7)
    value = torch.where(exponent == 0, small, large) / 2
    value[0x7F] = 0
    return value.to(torch.float32)


def iq4_nl(blocks: torch.Tensor) -> Unpacked:
    """18 bytes, 32 columns: f16 d, 16 bytes of codes. ``d * table[code]``.

    Column j has the low four bits of byte j, column j + 16 the high four.

    >>> parts = iq4_nl(torch.tensor([[0, 0x3C] + [0x9A] * 16], dtype=torch.uint8))
    >>> parts.codes[0, [0, 16]].tolist()
    [10, 9]
    """
    codes = shifted(blocks[:, 2:], (0, 4), 15).flatten(1)
    return Unpacked(codes, field(blocks, 0, 2, torch.float16))


def iq4_xs(blocks: torch.Tensor) -> Unpacked:
    """136 bytes, 256 columns: f16 d, u16 high bits, 4 bytes of low bits, 128 of codes.

    Scale g (groups of 32) has its low four bits in byte ``g // 2`` (high half for odd g) and its
    high two at bits ``2 g`` of the u16. Code byte ``16 g + j`` holds columns ``32 g + j`` (low four
    bits) and ``32 g + 16 + j``. ``d * (scale - 32) * table[code]``.

    >>> block = torch.tensor([[0, 0x3C, 0xAA, 0xAA] + [0x21] * 4 + [0x9A] * 128]).byte()
    >>> parts = iq4_xs(block)
    >>> parts.codes[0, [0, 16]].tolist(), parts.scale[0, :2].tolist()
    ([10, 9], [1.0, 2.0])
    """
    d = field(blocks, 0, 2, torch.float16).float()
    low = spread(blocks[:, 4:8], 4)
    high = spread(blocks[:, 2:4], 2)
    codes = shifted(blocks[:, 8:].view(-1, 8, 16), (0, 4), 15).flatten(1)
    return Unpacked(codes, d * ((low | (high << 4)).float() - 32))
