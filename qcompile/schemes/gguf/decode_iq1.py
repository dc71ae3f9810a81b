"""The block types of 256 columns at under two bits: a ternary codebook, moved by an eighth.

Comes in: uint8 ``[B, bytes]``. Goes out: Unpacked parts with codes 0, 1, 2 for -1, 0, 1 and the
form *offset*. Always holds: ``scale * code + offset`` is ``scale * (code - 1 + delta)`` bit for bit
for every finite scale: all terms fit in float32's 24 bits.

A grid entry spans 8 columns; delta is 0.125, or -0.125 where a bit says so.
"""

from __future__ import annotations

import torch

from qcompile.schemes.gguf.grids import grid_codes
from qcompile.schemes.gguf.unpacked import Unpacked, field, fields_of, pick, spread


def iq1_s(blocks: torch.Tensor) -> Unpacked:
    """50 bytes: f16 d, 32 bytes of low grid bits, 8 u16, one for each group of 32.

    The u16: [4 x 3] high grid bits, [1 x 3] scale, [1 x 1] sign of delta.
    ``d * (2 * scale + 1) * (entry + delta)``.

    >>> parts = iq1_s(torch.tensor([[0, 0x3C] + [0] * 32 + [0, 0x90] * 8]).byte())
    >>> parts.codes[0, :8].tolist(), parts.scale[0, 0].item(), parts.offset[0, 0].item()
    ([0, 0, 0, 0, 0, 0, 0, 0], 3.0, -3.375)
    """
    codes, scale, delta = _iq1_s(blocks)
    return Unpacked(codes, scale, scale * (delta - 1))


def iq1_s_values(blocks: torch.Tensor) -> torch.Tensor:
    """Float32 ``[B, 256]``; infinite scales stay infinite, where the offset form has NaN."""
    return _values(*_iq1_s(blocks))


def _iq1_s(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    d = field(blocks, 0, 2, torch.float16).float()
    words = field(blocks, 34, 50, torch.int16).int()
    index = blocks[:, 2:34].int() | (fields_of(words, (0, 3, 6, 9), 7) << 8)
    scale = d * (2 * ((words >> 12) & 7).float() + 1)
    return _codes(index), scale, _delta(words & 0x8000)


def iq1_m(blocks: torch.Tensor) -> Unpacked:
    """56 bytes: 32 bytes of low grid bits, 16 of high ones, 4 u16 of scales.

    Half-byte i of the 16: [1 x 3] high grid bits, [1 x 1] sign of delta, for 8 columns. Each u16:
    [4 x 3] scales of 16 columns each, [1 x 4] a quarter of the f16 d, lowest first.
    ``d * (2 * scale + 1) * (entry + delta)``; as delta changes every 8 columns, so does the group.

    >>> parts = iq1_m(torch.tensor([[0] * 32 + [8] * 16 + [0, 0] * 3 + [1, 0x30]]).byte())
    >>> parts.codes[0, :8].tolist(), parts.scale[0, [0, 24]].tolist()
    ([0, 0, 0, 0, 0, 0, 0, 0], [0.125, 0.375])
    >>> parts.offset[0, :2].tolist()
    [-0.140625, -0.109375]
    """
    codes, scale, delta = _iq1_m(blocks)
    return Unpacked(codes, scale, scale * (delta - 1))


def iq1_m_values(blocks: torch.Tensor) -> torch.Tensor:
    """Float32 ``[B, 256]``; infinite scales stay infinite, where the offset form has NaN."""
    return _values(*_iq1_m(blocks))


def _iq1_m(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    words = field(blocks, 48, 56, torch.int16).int()
    quarters = ((words >> 12) & 15) << torch.tensor(
        [0, 4, 8, 12], dtype=torch.int32, device=words.device
    )
    d = quarters.sum(dim=1, keepdim=True).to(torch.int16).view(torch.float16).float()
    high = spread(blocks[:, 32:48], 4).int()
    index = blocks[:, :32].int() | ((high & 7) << 8)
    scale = d * (2 * fields_of(words, (0, 3, 6, 9), 7).float() + 1)
    return _codes(index), scale.repeat_interleave(2, dim=1), _delta(high & 8)


def _codes(index: torch.Tensor) -> torch.Tensor:
    return pick(grid_codes("IQ1_S").view(torch.int64).flatten(), index).view(torch.uint8)


def _delta(negative: torch.Tensor) -> torch.Tensor:
    return 0.125 - 0.25 * (negative != 0).float()


def _values(codes: torch.Tensor, scale: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    groups = scale.shape[1]
    entries = codes.view(-1, groups, 256 // groups).float() - 1
    return (scale[..., None] * (entries + delta[..., None])).flatten(1)
