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
# Bytes of shared memory that one block may have (CUDA programming guide, compute capabilities).
SHARED = {
    "sm80": 163 << 10,
    "sm86": 99 << 10,
    "sm89": 99 << 10,
    "sm90": 227 << 10,
    "sm100": 227 << 10,
    "sm120": 99 << 10,
}
DEFAULT_ARCH = "sm80"
# Rows of a tile, its warps, its stages at most.
_TILES = ((8, 4, 4), (16, 4, 4), (32, 4, 4), (64, 4, 3), (128, 8, 3))
_OUTPUTS = 128
# Barriers, and scales on their way between threads.
_SPARE = 1 << 10
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
    """The tile for a product of ``rows`` inputs with a weight ``[n, k]``.

    It is the lowest that holds all rows, or the highest whose blocks fit shared memory twice.
    """
    fitting = [tile for tile in _TILES if _stages(arch, coding, tile) >= 2]
    tile = next((tile for tile in fitting if tile[0] >= rows), fitting[-1])
    height, warps, _ = tile
    parts = 1
    if rows <= 64:
        parts = _parts(arch, -(-n // _OUTPUTS), coding.blocks(k))
    return Config(
        height, _OUTPUTS, warps, _stages(arch, coding, tile), _on_sum(coding, height), parts
    )


def _on_sum(coding: Coding, height: int) -> bool:
    """Whether to scale sums: that costs rows of the tile for each group, where scaling weights
    costs the group's columns, and it takes registers, of which long blocks have none to spare.
    """
    if coding.form == "offset":
        return False
    if coding.group == 0:
        return True
    return coding.group >= 4 * height and (coding.block <= 256 or height <= 16)


def _stages(arch: str, coding: Coding, tile: tuple[int, int, int]) -> int:
    """Blocks that shared memory holds at once, at most the tile's; 1 where it holds no two.

    From sm90 on the matrix unit reads the input where it lies, so that one more is kept.
    """
    height, _, most = tile
    arch = arch if arch in SHARED else DEFAULT_ARCH
    x = height * coding.block * 2
    w = _OUTPUTS * coding.block * (coding.low + coding.high) // 8
    kept = x if int(arch.removeprefix("sm")) in (90, 100) else 0
    room = SHARED[arch] - _SPARE - kept
    return max(1, min(most, 1 + room // (x + w)))


def _parts(arch: str, tiles: int, blocks: int) -> int:
    """As many parts of K as give every multiprocessor two tiles, a power of two."""
    wanted = 2 * _PROCESSORS.get(arch, _PROCESSORS[DEFAULT_ARCH]) // tiles
    most = min(wanted, blocks // _FEWEST_BLOCKS, _MOST_PARTS)
    return 1 << max(0, most.bit_length() - 1)
