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

from qcompile.backends.cuda.ahead import Binary, compiling
from qcompile.backends.cuda.sass import MATRIX, Figures, figures
from qcompile.backends.cuda.shipped import Case
from qcompile.backends.rules import Rule, name_of, unless

ARCHITECTURES = ("sm80", "sm89", "sm90", "sm100")
# Bytes of shared memory that one block may have (CUDA programming guide, compute capabilities).
SHARED = {
    "sm80": 163 << 10,
    "sm86": 99 << 10,
    "sm89": 99 << 10,
    "sm90": 227 << 10,
    "sm100": 227 << 10,
    "sm120": 99 << 10,
}
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
        binary: the product's kernel.
        figures: of the binary.
    """

    case: Case
    arch: str
    binary: Binary
    figures: Figures

    @property
    def small(self) -> bool:
        """Whether a tile has few rows of input."""
        return self.case.config(self.arch).rows <= SMALL

    @property
    def weights(self) -> float:
        """Weights that one turn of the main loop reads."""
        config = self.case.config(self.arch)
        return config.outputs * self.case.coding.block * self.turns

    @property
    def turns(self) -> float:
        """Blocks of K in one turn of the main loop; more than one where it was unrolled."""
        config, counts = self.case.config(self.arch), self.figures.counts()
        kind = next((kind for kind in MATRIX if counts[kind]), None)
        if kind is None:
            return 0.0
        weights, rows = _PRODUCTS[kind]
        by = {"HMMA": config.warps, "HGMMA": config.warps // 4, "UTCMMA": 1}[kind]
        tile = config.outputs * self.case.coding.block * max(1, config.rows // rows)
        return counts[kind] * weights * by / tile

    @property
    def per_weight(self) -> float:
        """Instructions for each weight."""
        threads = self.case.config(self.arch).warps * _LANES
        return len(self.figures.loop) * threads / self.weights if self.turns else 0.0

    def plain(self) -> dict[str, Any]:
        """The row as JSON."""
        config, found = self.case.config(self.arch), self.figures
        return {
            "case": str(self.case),
            "arch": self.arch,
            "dtype": name_of(self.case.dtype),
            "tile": f"{config.rows}x{config.outputs}x{self.case.coding.block}",
            "warps": config.warps,
            "stages": config.stages,
            "parts": config.parts,
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
    if not (row.small and nibbles) or 0 < coding.group < 32:
        return None
    base = 3.5 if coding.group == 32 else 2.8
    return base + (0.6 if row.case.dtype.itemsize == 2 and _is_bfloat16(row) else 0.0)


def _is_bfloat16(row: Row) -> bool:
    return name_of(row.case.dtype) == "bfloat16"


def _spills(row: Row) -> str | None:
    found = row.figures
    return unless(found.stack == found.local == 0, f"stack {found.stack}, local {found.local}")


def _shared(row: Row) -> str | None:
    limit = SHARED[row.arch]
    return unless(row.binary.shared <= limit, f"{row.binary.shared} bytes, {row.arch} has {limit}")


def _matrix(row: Row) -> str | None:
    products = [one for one in row.figures.loop if one.kind in MATRIX]
    if not products:
        return "no matrix instruction in a loop"
    if row.arch == "sm90" and row.case.config(row.arch).rows >= 64:
        kinds = {one.kind for one in products}
        return unless(kinds == {"HGMMA"}, f"{', '.join(sorted(map(str, kinds)))} in large tiles")
    return None


def _first_operand(row: Row) -> str | None:
    for one in row.figures.loop:
        names = one.operands.split(",")
        if one.kind == "HGMMA" and not names[1].strip().startswith("R"):
            return f"{one.name} {one.operands}"
        if one.kind == "UTCMMA" and not names[0].strip().startswith("tmem"):
            return f"{one.name} {one.operands}"
    words = row.figures.counts()
    if words["HMMA"] and not words["LDSM"]:
        return "HMMA without LDSM"
    return None


def _conversions(row: Row) -> str | None:
    coding, count = row.case.coding, row.figures.count("I2F")
    narrow = row.small and coding.low + coding.high == 4
    return unless(not narrow or count == 0, f"{count} I2F in the main loop")


def _copies(row: Row) -> str | None:
    """Copies of the input may be narrow: a tile of few rows has less than 16 bytes a thread."""
    config, coding = row.case.config(row.arch), row.case.coding
    size = row.weights * (coding.low + coding.high) / 8
    wanted = size / _COPIED / (config.warps * _LANES)
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


def compiled(case: Case, arch: str) -> Row:
    """Compile a case."""
    with compiling(arch) as binaries:
        case.launch(arch)
    first = binaries[0]
    return Row(case, arch, first, figures(first.code))


def table(cases: Sequence[Case], architectures: Sequence[str]) -> Iterator[Row]:
    """Compile cases, one after the other."""
    for arch in architectures:
        for case in cases:
            yield compiled(case, arch)
