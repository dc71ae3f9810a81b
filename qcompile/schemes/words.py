"""Codes packed in 32-bit words.

Comes in: codes, one a byte, or words. Goes out: the other.
Always holds: along the packed dimension the words are one little-endian stream of bits; code ``i``
takes bits ``[i * bits, (i + 1) * bits)`` of it, so codes of 3, 5, 6 and 7 bits may straddle two
words. The last word is padded with zero bits.

For 2, 4 and 8 bits this is ``32 // bits`` codes a word, lowest first, as GPTQ and
compressed-tensors write them; for 3 bits it is the order in which both write 32 codes in three
words.

>>> import torch
>>> codes = torch.tensor([7, 0, 1, 2, 3, 4, 5, 6, 7, 0, 5], dtype=torch.uint8)
>>> words = pack_words(codes, 3, 0)
>>> [f"{word & 0xFFFFFFFF:08x}" for word in words.tolist()]
['47d63447', '00000001']
>>> torch.equal(unpack_words(words, 3, 0, 11), codes)
True
"""

from __future__ import annotations

import math

import torch

_WORD = 32


def words_for(count: int, bits: int) -> int:
    """Words that hold ``count`` codes."""
    return -(-count * bits // _WORD)


def pack_words(codes: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Pack codes along one dimension.

    Args:
        codes: uint8, any shape, every value below ``2**bits``.
        bits: 1 to 8.
        dim: the dimension that shrinks.

    Returns:
        int32, ``words_for(codes.shape[dim], bits)`` along ``dim``.
    """
    dim %= codes.dim()
    count = codes.shape[dim]
    period, width = _period(bits)
    lead, trail = codes.shape[:dim], codes.shape[dim + 1 :]
    blocks = -(-count // period)
    padded = codes.new_zeros((*lead, blocks * period, *trail))
    padded.narrow(dim, 0, count).copy_(codes)
    units = padded.unflatten(dim, (blocks, period))
    words = torch.zeros((*lead, blocks, width, *trail), dtype=torch.int32, device=codes.device)
    for place in range(period):
        word, shift = divmod(place * bits, _WORD)
        code = units.select(dim + 1, place).to(torch.int32)
        words.select(dim + 1, word).bitwise_or_(code << shift)
        if shift + bits > _WORD:
            words.select(dim + 1, word + 1).bitwise_or_(code >> (_WORD - shift))
    return words.flatten(dim, dim + 1).narrow(dim, 0, words_for(count, bits)).contiguous()


def unpack_words(words: torch.Tensor, bits: int, dim: int, count: int) -> torch.Tensor:
    """Take packed codes apart.

    Args:
        words: int32, any shape.
        bits: 1 to 8.
        dim: the dimension that grows.
        count: codes along ``dim``; the words must hold at least as many.

    Returns:
        uint8, ``count`` along ``dim``.
    """
    dim %= words.dim()
    period, width = _period(bits)
    lead, trail = words.shape[:dim], words.shape[dim + 1 :]
    blocks = -(-words.shape[dim] // width)
    if words.shape[dim] != blocks * width:
        padded = words.new_zeros((*lead, blocks * width, *trail))
        padded.narrow(dim, 0, words.shape[dim]).copy_(words)
        words = padded
    units = words.unflatten(dim, (blocks, width))
    codes = torch.empty((*lead, blocks, period, *trail), dtype=torch.uint8, device=words.device)
    for place in range(period):
        word, shift = divmod(place * bits, _WORD)
        # An arithmetic shift fills with the sign; the masks drop those bits.
        low = min(bits, _WORD - shift)
        value = (units.select(dim + 1, word) >> shift) & ((1 << low) - 1)
        if low < bits:
            high = units.select(dim + 1, word + 1) & ((1 << (bits - low)) - 1)
            value = value | (high << low)
        codes.select(dim + 1, place).copy_(value)
    return codes.flatten(dim, dim + 1).narrow(dim, 0, count)


def _period(bits: int) -> tuple[int, int]:
    """Codes and words after which the pattern of straddling repeats."""
    common = math.gcd(bits, _WORD)
    return _WORD // common, bits // common
