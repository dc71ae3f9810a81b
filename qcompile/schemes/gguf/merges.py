"""The merges that a scored vocabulary implies.

Comes in: pieces of text, best first. Goes out: pairs of pieces, in the order in which a byte-pair
encoder has to try them.
Always holds: an encoder that applies the pairs joins the same neighbours as one that always joins
the two neighbours whose joint text has the best score, as SentencePiece's BPE does. (Where two
pieces have one score, the earlier piece goes first here and the leftmost place there.)

A vocabulary has hundreds of thousands of pieces and millions of places to cut them, so the cuts
are looked up as 64-bit hashes in arrays. A wrong pair needs two texts with one hash, and an encoder
refuses a pair whose joint text it does not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_Hashes = npt.NDArray[np.uint64]
_Indices = npt.NDArray[np.int64]
# An odd number has an inverse modulo 2**64, which is what numpy's uint64 computes in.
_BASE = 0x9E3779B97F4A7C15
_TABLE_BITS = 22


@dataclass(frozen=True)
class _Texts:
    """Pieces end to end, and hashes of any part: ``(sums[end] - sums[start]) * inverse[start]``."""

    start: _Indices
    end: _Indices
    data: npt.NDArray[np.uint8]
    sums: _Hashes
    inverse: _Hashes

    def hashes(self, start: _Indices, end: _Indices) -> _Hashes:
        parts: _Hashes = (self.sums[end] - self.sums[start]) * self.inverse[start]
        return parts


def implied_merges(pieces: Sequence[str]) -> list[tuple[str, str]]:
    """Every way to cut a piece into two others, cuts of better pieces first.

    Args:
        pieces: different, non-empty texts, best first.

    >>> implied_merges(["ab", "abc", "bc", "a", "b", "c"])
    [('a', 'b'), ('a', 'bc'), ('ab', 'c'), ('b', 'c')]
    """
    if not pieces:
        return []
    texts = _texts(pieces)
    whole = texts.hashes(texts.start, texts.end)
    order = np.argsort(whole)
    ordered = whole[order]
    # Most cuts are no pair; a table finds that out, and most of the others' places, without a
    # search. Where two pieces have one slot it holds either, and a search finds the other.
    table = np.full(1 << _TABLE_BITS, -1, dtype=np.int32)
    table[_slot(ordered)] = np.arange(len(ordered), dtype=np.int32)
    owner, cut = _cuts(texts)
    left = texts.hashes(texts.start[owner], cut)
    first = table[_slot(left)]
    likely = first >= 0
    owner, cut, left, first = owner[likely], cut[likely], left[likely], first[likely]
    right = texts.hashes(cut, texts.end[owner])
    second = table[_slot(right)]
    likely = second >= 0
    places = [
        _verified(left[likely], first[likely], ordered),
        _verified(right[likely], second[likely], ordered),
    ]
    found = (places[0] >= 0) & (places[1] >= 0)
    names = np.array(pieces, dtype=object)[order]
    return list(zip(*(names[place[found]].tolist() for place in places), strict=True))


def _texts(pieces: Sequence[str]) -> _Texts:
    encoded = [piece.encode("utf-8", "surrogatepass") for piece in pieces]
    length = np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded))
    data = np.frombuffer(b"".join(encoded), dtype=np.uint8)
    end = np.cumsum(length)
    table = np.random.default_rng(0).integers(0, 1 << 64, 256, dtype=np.uint64)
    sums = np.zeros(len(data) + 1, dtype=np.uint64)
    np.cumsum(table[data] * _powers(_BASE, len(data)), out=sums[1:])
    inverse = _powers(pow(_BASE, -1, 1 << 64), len(data) + 1)
    return _Texts(end - length, end, data, sums, inverse)


def _powers(base: int, count: int) -> _Hashes:
    powers = np.full(count, base, dtype=np.uint64)
    powers[0] = 1
    np.cumprod(powers, out=powers)
    return powers


def _cuts(texts: _Texts) -> tuple[_Indices, _Indices]:
    """Every place inside a piece between two characters: the piece's index and the byte."""
    inside = (texts.data & 0xC0) != 0x80
    inside[texts.start] = False
    cut = np.flatnonzero(inside)
    owner: _Indices = np.searchsorted(texts.start, cut, side="right") - 1
    return owner, cut


def _slot(hashes: _Hashes) -> _Indices:
    slots: _Indices = (hashes >> np.uint64(64 - _TABLE_BITS)).astype(np.int64)
    return slots


def _verified(
    hashes: _Hashes, guess: npt.NDArray[np.int32], ordered: _Hashes
) -> npt.NDArray[np.int32]:
    """Where each hash stands in an ascending list, or -1; ``guess`` is right for most."""
    wrong = np.flatnonzero(ordered[guess] != hashes)
    guess[wrong] = _find(hashes[wrong], ordered)
    return guess


def _find(hashes: _Hashes, ordered: _Hashes) -> _Indices:
    """Where each hash stands in an ascending list, -1 where it does not."""
    place = np.minimum(np.searchsorted(ordered, hashes), len(ordered) - 1)
    found: _Indices = np.where(ordered[place] == hashes, place, -1)
    return found
