"""The ternary block types: 256 columns of -1, 0 or 1 with one scale.

Comes in: uint8 ``[B, bytes]``. Goes out: Unpacked parts with codes from 0, for ``code - 1``.
Always holds: the scale is the stored float16, untouched.
"""

from __future__ import annotations

import torch

from qcompile.schemes.gguf.unpacked import Unpacked, field, shifted

_POWERS = (1, 3, 9, 27, 81)


def tq1_0(blocks: torch.Tensor) -> Unpacked:
    """54 bytes: 48 bytes of five digits each, 4 bytes of four digits, f16 d. ``d * (code - 1)``.

    A byte is a fraction ``byte / 256`` in base 3. Digit i of bytes 0..31 is column ``32 i + j``, of
    bytes 32..47 column ``160 + 16 i + j``, of bytes 48..51 column ``240 + 4 i + j``.

    >>> block = torch.tensor([[128] * 52 + [0, 0x3C]], dtype=torch.uint8)
    >>> tq1_0(block).codes[0, [0, 32, 160, 240]].tolist()
    [1, 1, 1, 1]
    """
    runs = ((0, 32, 5), (32, 48, 5), (48, 52, 4))
    digits = [_digits(blocks[:, start:stop], count) for start, stop, count in runs]
    return Unpacked(torch.cat(digits, dim=1), field(blocks, 52, 54, torch.float16))


def _digits(packed: torch.Tensor, count: int) -> torch.Tensor:
    powers = torch.tensor(_POWERS[:count], dtype=torch.uint8, device=packed.device)
    # In bytes the product wraps, which drops the digits before the wanted one.
    shifted_left = packed[:, None, :] * powers[:, None]
    return ((shifted_left.to(torch.int16) * 3) >> 8).to(torch.uint8).flatten(1)


def tq2_0(blocks: torch.Tensor) -> Unpacked:
    """66 bytes: 64 bytes of codes, f16 d. ``d * (code - 1)``.

    Byte ``32 h + j`` holds columns ``128 h + j + 32 s`` at bits ``2 s``.

    >>> block = torch.tensor([[0b10_01_00_10] * 64 + [0, 0x3C]], dtype=torch.uint8)
    >>> tq2_0(block).codes[0, [0, 32, 64, 96]].tolist()
    [2, 0, 1, 2]
    """
    codes = shifted(blocks[:, :64].view(-1, 2, 32), (0, 2, 4, 6), 3)
    return Unpacked(codes.flatten(1), field(blocks, 64, 66, torch.float16))
