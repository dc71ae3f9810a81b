"""Kernels compiled for devices that are not here: what they need, and whether that may ship.

Comes in: a case and an architecture. Goes out: figures of the binary, and the rules it breaks.
Always holds: a rule says what must hold and why; no rule is about speed, which only a device tells.

``instructions per weight`` are those of the main loop times the threads of a block, over the
weights that one turn of the loop reads. To read 4-bit weights as fast as an H200 reads memory, at
most 3.5 may be issued for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qcompile.backends.cuda.ahead import Binary, compiling
from qcompile.backends.cuda.configs import SHARED, Config
from qcompile.backends.cuda.sass import MATRIX, Figures, figures
from qcompile.backends.cuda.shipped import Launch
from qcompile.backends.rules import Rule, unless

ARCHITECTURES = ("sm80", "sm89", "sm90", "sm100")
SMALL = 32  # rows of a tile up to which reading weights is what takes the time
_LANES = 32
_COPIED = 16  # bytes
# Weights that one instruction multiplies for a warp, four warps or a block, and rows of input.
_PRODUCTS = {"HMMA": (16 * 16, 8), "HGMMA": (64 * 16, 256), "UTCMMA": (128 * 16, 256)}


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        case: what was launched.
        arch: for which architecture.
        binary: of the first kernel of the launch.
        figures: of the binary.
    """

    case: Launch
    arch: str
    binary: Binary
    figures: Figures

    @property
    def tile(self) -> Config | None:
        """The tile of a product, None for what multiplies nothing."""
        return self.case.tile(self.arch)

    @property
    def turns(self) -> float:
        """Blocks of K in one turn of the main loop; more than one where it was unrolled."""
        tile, counts = self.tile, self.figures.counts()
        kind = next((kind for kind in MATRIX if counts[kind]), None)
        if tile is None or kind is None:
            return 0.0
        weights, rows = _PRODUCTS[kind]
        by = {"HMMA": tile.warps, "HGMMA": tile.warps // 4, "UTCMMA": 1}[kind]
        block = tile.outputs * self.case.coding.block * max(1, tile.rows // rows)
        return counts[kind] * weights * by / block

    @property
    def weights(self) -> float:
        """Weights that one turn of the main loop reads."""
        return 0.0 if self.tile is None else self.tile.outputs * self.case.coding.block * self.turns

    @property
    def per_weight(self) -> float:
        """Instructions for each weight."""
        if self.tile is None or not self.turns:
            return 0.0
        return len(self.figures.loop) * self.tile.warps * _LANES / self.weights

    def plain(self) -> dict[str, Any]:
        """The row as JSON."""
        found, tile = self.figures, self.tile
        shape = "" if tile is None else f"{tile.rows}x{tile.outputs}x{self.case.coding.block}"
        return {
            "case": str(self.case),
            "arch": self.arch,
            "tile": shape,
            "warps": self.binary.warps,
            "stages": 0 if tile is None else tile.stages,
            "parts": 1 if tile is None else tile.parts,
            "registers": found.registers,
            "stack": found.stack,
            "local": found.local,
            "shared": self.binary.shared,
            "loop": len(found.loop),
            "per_weight": round(self.per_weight, 2),
            "counts": dict(found.counts()),
            "broken": violated(self),
        }


# **** rules ****


def budget(row: Row) -> float | None:
    """Instructions that a weight may cost, None where memory is not what limits.

    Wider codes take longer to read, so more instructions fit; groups of 16 are read with many
    scales, for which nothing is promised.
    """
    coding = row.case.coding
    nibbles = coding.low == 4 and coding.high == 0 and coding.kind == "code"
    if row.tile is None or row.tile.rows > SMALL or not nibbles or 0 < coding.group < 32:
        return None
    # bfloat16 has fewer mantissa bits: each plane of a word needs a shift of its own.
    more = 0.6 if row.case.dtype == torch.bfloat16 else 0.0
    return (3.5 if coding.group == 32 else 2.8) + more


def _spills(row: Row) -> str | None:
    found = row.figures
    return unless(found.stack == found.local == 0, f"stack {found.stack}, local {found.local}")


def _shared(row: Row) -> str | None:
    limit = SHARED[row.arch]
    return unless(row.binary.shared <= limit, f"{row.binary.shared} bytes, {row.arch} has {limit}")


def _matrix(row: Row) -> str | None:
    if row.tile is None:
        return None
    kinds = sorted({str(one.kind) for one in row.figures.loop if one.kind in MATRIX})
    if not kinds:
        return "no matrix instruction in a loop"
    whole = row.arch != "sm90" or row.tile.rows < 64 or kinds == ["HGMMA"]
    return unless(whole, f"{', '.join(kinds)} in a tile of {row.tile.rows} rows on sm90")


def _first_operand(row: Row) -> str | None:
    for one in row.figures.loop:
        names = [name.strip() for name in one.operands.split(",")]
        if one.kind == "HGMMA" and not names[1].startswith("R"):
            return f"{one.name} {one.operands}"
        if one.kind == "UTCMMA" and not names[0].startswith("tmem"):
            return f"{one.name} {one.operands}"
    counts = row.figures.counts()
    return unless(not counts["HMMA"] or counts["LDSM"] > 0, "HMMA without LDSM")


def _conversions(row: Row) -> str | None:
    coding, count = row.case.coding, row.figures.count("I2F")
    narrow = row.tile is not None and row.tile.rows <= SMALL and coding.low + coding.high == 4
    return unless(not narrow or count == 0, f"{count} I2F in the main loop")


def _copies(row: Row) -> str | None:
    """Copies of the input may be narrow: a tile of few rows has less than 16 bytes a thread."""
    if row.tile is None:
        return None
    coding = row.case.coding
    size = row.weights * (coding.low + coding.high) / 8
    wanted = size / _COPIED / (row.tile.warps * _LANES)
    wide = sum(one.kind == "LDGSTS" and one.name.endswith(".128") for one in row.figures.loop)
    return unless(wide >= wanted, f"{wide} of {wanted:.0f} copies of weights have")


def _instructions(row: Row) -> str | None:
    limit = budget(row)
    return unless(
        limit is None or row.per_weight <= limit + 0.005,
        f"{row.per_weight:.2f}, at most {limit}",
    )


RULES: tuple[Rule[Row], ...] = (
    Rule("nothing may spill", "spilled registers are read back from memory", _spills),
    Rule("shared memory must fit", "a launch fails", _shared),
    Rule("the main loop must use the matrix unit", "float units are 16 times slower", _matrix),
    Rule(
        "weights must be decoded in registers, or in the unit's own memory",
        "writing them back to shared memory halves the rate",
        _first_operand,
    ),
    Rule(
        "4-bit codes must not be converted", "I2F is issued at a quarter of the rate", _conversions
    ),
    Rule(
        "copies to shared memory must have 16 bytes", "narrower ones are issued as often", _copies
    ),
    Rule("instructions per weight must fit", "more take longer than reading", _instructions),
)


def violated(row: Row) -> list[str]:
    """The rules that a binary breaks, one line each."""
    found = ((rule, rule.found(row)) for rule in RULES)
    return [f"{rule.text}: {text} ({rule.source})" for rule, text in found if text is not None]


# **** compiling ****


def compiled(case: Launch, arch: str) -> Row:
    """Compile a case."""
    with compiling(arch) as binaries:
        case.launch(arch)
    first = binaries[0]
    return Row(case, arch, first, figures(first.code))


def table(cases: Sequence[Launch], architectures: Sequence[str]) -> Iterator[Row]:
    """Compile cases, one after the other."""
    for arch in architectures:
        for case in cases:
            yield compiled(case, arch)
