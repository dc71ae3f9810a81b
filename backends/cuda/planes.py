"""Words of 16 bits from codes, and back.

Comes in: codes uint8 ``[N, K]``. Goes out: ``codes`` and ``high`` of ``layouts``.
Always holds: ``unpack`` gives back what ``pack`` took, then the padding as zeros.

>>> import torch
>>> coding = Coding(8, 0, "code", "symmetric", 128, 16, 0)
>>> codes = torch.arange(32, dtype=torch.uint8).reshape(1, 32)
>>> words, _ = pack(codes, coding)
>>> [hex(int(word)) for word in words[0, 0, :3]]
['0x1000', '0x1101', '0x1202']
>>> bool((unpack(words, None, coding) == codes).all())
True
"""

from __future__ import annotations

import torch
from torch.nn import functional

from qcompile.backends.cuda.coding import WORD, Coding


def pack(codes: torch.Tensor, coding: Coding) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The words of the low bits, and those of the high bits where there are any."""
    columns = codes.shape[1]
    padded = functional.pad(codes, (0, coding.blocks(columns) * coding.block - columns))
    low = _words(padded & ((1 << coding.low) - 1), coding.low, coding.width)
    high = _words(padded >> coding.low, coding.high, coding.width) if coding.high else None
    return low, high


def unpack(words: torch.Tensor, high: torch.Tensor | None, coding: Coding) -> torch.Tensor:
    """Codes uint8 ``[N, K]``, K padded to whole blocks."""
    codes = _fields(words, coding.low)
    return codes if high is None else codes | (_fields(high, coding.high) << coding.low)


def _words(fields: torch.Tensor, bits: int, width: int) -> torch.Tensor:
    """Fields ``[N, K]`` of some bits as words ``[blocks, N, width]``."""
    n, per_word = fields.shape[0], WORD // bits
    split = fields.reshape(n, -1, per_word, width)
    words = torch.zeros(n, split.shape[1], width, dtype=torch.int16)
    for plane in range(per_word):
        words |= split[:, :, plane].to(torch.int16) << (bits * plane)
    return words.transpose(0, 1).contiguous()


def _fields(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of ``_words``."""
    blocks, n, width = words.shape
    split = torch.empty(n, blocks, WORD // bits, width, dtype=torch.uint8)
    for plane in range(WORD // bits):
        field = (words >> (bits * plane)) & ((1 << bits) - 1)
        split[:, :, plane] = field.transpose(0, 1).to(torch.uint8)
    return split.reshape(n, -1)
