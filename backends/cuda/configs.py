"""Which tile a product runs in.

Comes in: an architecture, a coding, sizes. Goes out: a ``Config``.
Always holds: the answer is a table's, never a measurement's: a first call compiles one kernel and
times none, so captured graphs and interpreted runs do as much as any other.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from qcompile.backends.cuda.coding import Coding

# Multiprocessors: how many tiles run at once.
_PROCESSORS = {
    "sm80": 108,
    "sm86": 84,
    "sm89": 142,
    "sm90": 132,
    "sm100": 148,
    "sm120": 170,
}
DEFAULT_ARCH = "sm80"
# From this many rows on it is cheaper to decode the weight once and to multiply floats.
DECODE_ROWS = 1024
# Weights of one such buffer.
DECODED_AT_ONCE = 1 << 26
_MOST_PARTS = 8
# A part of K shorter than this only adds partial sums.
_FEWEST_BLOCKS = 4


@dataclass(frozen=True)
class Config:
    """A tile and how it runs.

    Attributes:
        rows: rows of the input in a tile.
        outputs: outputs in a tile.
        warps: warps of a tile.
        stages: blocks on their way from memory at once.
        on_sum: whether scales multiply sums instead of weights.
        parts: parts of K that run side by side.
    """

    rows: int
    outputs: int
    warps: int
    stages: int
    on_sum: bool
    parts: int = 1


@functools.lru_cache(maxsize=4096)
def choose(arch: str, coding: Coding, n: int, k: int, rows: int) -> Config:
    """The tile for a product of ``rows`` inputs with a weight ``[n, k]``."""
    on_sum = coding.form != "offset"
    if rows > 64:
        return Config(128, 128, 8, 3, False)
    if rows > 32:
        return Config(64, 128, 4, 3, on_sum)
    height = 8 if rows <= 8 else 16 if rows <= 16 else 32
    tiles = -(-n // 128)
    parts = _parts(arch, tiles, coding.blocks(k))
    return Config(height, 128, 4, 4, on_sum, parts)


def _parts(arch: str, tiles: int, blocks: int) -> int:
    """As many parts of K as give every multiprocessor two tiles, a power of two."""
    wanted = 2 * _PROCESSORS.get(arch, _PROCESSORS[DEFAULT_ARCH]) // tiles
    most = min(wanted, blocks // _FEWEST_BLOCKS, _MOST_PARTS)
    return 1 << max(0, most.bit_length() - 1)
