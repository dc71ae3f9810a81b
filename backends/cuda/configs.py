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
# Where products are made by single warps, sums of 64 rows take the registers of twice the warps.
_WARP_TILES = (*_TILES[:3], (64, 8, 3), _TILES[4])
# The compiler would rather spill a register than let fewer blocks run at once, which shared memory
# does not let it anyway.
_REGISTERS = 255
_GROUPS_OF_WARPS = ("sm90", "sm100")
# Outputs of a tile; twice as many where the scales of short groups are much of what is read, and
# each of them is then worth more instructions.
_OUTPUTS = 128
_SHORT_GROUP, _MANY_OUTPUTS, _LOW = 32, 3584, 16
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
        registers: of a thread at most; None leaves that to the compiler.
    """

    rows: int
    outputs: int
    warps: int
    stages: int
    on_sum: bool
    parts: int = 1
    registers: int | None = None


@functools.lru_cache(maxsize=4096)
def choose(arch: str, coding: Coding, n: int, k: int, rows: int) -> Config:
    """The tile for a product of ``rows`` inputs with a weight ``[n, k]``.

    It is the lowest that holds all rows, or the highest whose blocks fit shared memory twice.
    """
    by_groups = arch in _GROUPS_OF_WARPS
    tiles = _TILES if by_groups else _WARP_TILES
    fitting = [tile for tile in tiles if _stages(arch, coding, tile, _OUTPUTS) >= 2]
    tile = next((tile for tile in fitting if tile[0] >= rows), fitting[-1])
    height, warps, _ = tile
    outputs = _outputs(arch, coding, n, tile)
    parts = _parts(arch, -(-n // outputs), coding.blocks(k)) if rows <= 64 else 1
    stages = _stages(arch, coding, tile, outputs)
    registers = None if arch == "sm90" else _REGISTERS
    return Config(height, outputs, warps, stages, _on_sum(arch, coding, height), parts, registers)


def _outputs(arch: str, coding: Coding, n: int, tile: tuple[int, int, int]) -> int:
    """Outputs of a tile. Long blocks take registers, and half a minute to compile, as it is; so do
    lookups of single warps, and all but nibbles where sums lie in the matrix unit's own memory.
    """
    short = 0 < coding.group <= _SHORT_GROUP and coding.block <= 128
    nibbles = coding.kind == "code" and coding.low + coding.high == 4
    room = nibbles if arch == "sm100" else coding.kind != "table" or arch == "sm90"
    wide = short and room and n >= _MANY_OUTPUTS and tile[0] <= _LOW * (2 if nibbles else 1)
    return 2 * _OUTPUTS if wide and _stages(arch, coding, tile, 2 * _OUTPUTS) > 2 else _OUTPUTS


def _on_sum(arch: str, coding: Coding, height: int) -> bool:
    """Whether to scale sums: that costs rows of the tile for each group, where scaling weights
    costs the group's columns, and it takes registers, of which long blocks have none to spare.
    """
    if coding.form == "offset":
        return False
    if coding.group == 0:
        return True
    if arch == "sm90" and height == 32 and coding.kind == "code" and coding.block <= 256:
        return coding.group >= 64
    return coding.group >= 4 * height and (coding.block <= 256 or height <= 16)


def _stages(arch: str, coding: Coding, tile: tuple[int, int, int], outputs: int) -> int:
    """Blocks that shared memory holds at once, at most the tile's; 1 where it holds no two.

    From sm90 on the matrix unit reads the input where it lies, so that one more is kept.
    """
    height, _, most = tile
    arch = arch if arch in SHARED else DEFAULT_ARCH
    x = height * coding.block * 2
    w = outputs * coding.block * (coding.low + coding.high) // 8
    kept = x if arch in _GROUPS_OF_WARPS else 0
    room = SHARED[arch] - _SPARE - kept
    return max(1, min(most, 1 + room // (x + w)))


def _parts(arch: str, tiles: int, blocks: int) -> int:
    """As many parts of K as give every multiprocessor two tiles, a power of two."""
    wanted = 2 * _PROCESSORS.get(arch, _PROCESSORS[DEFAULT_ARCH]) // tiles
    most = min(wanted, blocks // _FEWEST_BLOCKS, _MOST_PARTS)
    return 1 << max(0, most.bit_length() - 1)
