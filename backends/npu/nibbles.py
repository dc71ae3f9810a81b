"""Eight int4 in an int32, in torch alone.

Comes in: codes, or words of other packings. Goes out: words as ``npu_convert_weight_to_int4pack``
makes them: along the last dimension, the first value in the lowest four bits, two's complement.
Always holds: nothing here needs the vendor's package, so weights can be packed anywhere.

>>> import torch
>>> words = pack(torch.tensor([[-8, -1, 0, 1, 2, 3, 4, 7]], dtype=torch.int8))
>>> f"{words.item() & 0xFFFFFFFF:08x}"
'743210f8'
>>> unpack(words).tolist()
[[-8, -1, 0, 1, 2, 3, 4, 7]]
"""

from __future__ import annotations

import torch

PER_WORD = 8
# Added to each of eight unsigned codes, without a carry, it makes them signed: q ^ 8 is q - 8.
_MIDDLE = -0x77777778
# AWQ keeps value i of eight at this place of its word.
_AWQ_PLACE = (0, 4, 1, 5, 2, 6, 3, 7)


def pack(values: torch.Tensor) -> torch.Tensor:
    """Words int32 ``[*, C / 8]`` of int8 values ``[*, C]`` from -8 to 7."""
    low = values[..., 0::2].to(torch.uint8) & 15
    high = values[..., 1::2].to(torch.uint8) << 4
    return (low | high).contiguous().view(torch.int32)


def unpack(words: torch.Tensor) -> torch.Tensor:
    """The int8 values ``[*, 8 C]`` of words ``[*, C]``."""
    octets = words.contiguous().view(torch.uint8)
    both = torch.stack((octets & 15, octets >> 4), -1).flatten(-2)
    return ((both ^ 8).to(torch.int8) - 8).reshape(*words.shape[:-1], -1)


def signed(words: torch.Tensor) -> torch.Tensor:
    """Words of ``q - 8`` from words of unsigned codes ``q`` in the same order.

    A word of GPTQ holds eight columns of one row, lowest first, so its ``qweight`` transposed is
    ``[N, K / 8]`` in the right order already.
    """
    return words ^ _MIDDLE


def from_awq(words: torch.Tensor) -> torch.Tensor:
    """Words of unsigned codes in order, from words in AWQ's order."""
    out = torch.zeros_like(words)
    for value, place in enumerate(_AWQ_PLACE):
        out |= ((words >> (4 * place)) & 15) << (4 * value)
    return out


def turn(words: torch.Tensor) -> torch.Tensor:
    """Words along the other dimension: ``[R / 8, C]`` over rows to ``[R, C / 8]`` over columns.

    Word ``[i, c]`` holds rows ``8 i + j`` of column c at bits ``4 j``; the result holds, in word
    ``[r, k]``, columns ``8 k + j`` of row r. Eight words are a square of 8 x 8 nibbles, which three
    rounds of swapping halves, quarters and eighths transpose.

    >>> words = torch.tensor([[0x0, 0x1, 0x2, 0x3, 0x4, 0x5, 0x6, 0x7]], dtype=torch.int32)
    >>> f"{turn(words)[0, 0].item():08x}"
    '76543210'
    """
    rows, columns = words.shape
    square = list(words.reshape(rows, columns // PER_WORD, PER_WORD).unbind(-1))
    for step, mask in ((4, 0x0000FFFF), (2, 0x00FF00FF), (1, 0x0F0F0F0F)):
        shift = 4 * step
        for i in range(PER_WORD):
            if i & step:
                continue
            low, high = square[i], square[i + step]
            # The mask drops what an arithmetic shift draws in from the sign.
            swap = ((low >> shift) ^ high) & mask
            square[i + step] = high ^ swap
            square[i] = low ^ (swap << shift)
    return torch.stack(square, 1).reshape(rows * PER_WORD, columns // PER_WORD)
