"""What a compiled kernel needs of a multiprocessor, and what its main loop does.

Comes in: an ELF file for an NVIDIA device. Goes out: registers, memory, counts of instructions.
Always holds: the file is read, never run; the tools come with the package ``triton``. Counts are
static: they say what has to be issued, not how long it waits.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qcompile.errors import OptionError

# Classes of instructions by the beginning of their names; the first that fits counts.
CLASSES: dict[str, str] = {
    "HGMMA": r"HGMMA|WGMMA",
    "UTCMMA": r"UTC\w*MMA",
    "HMMA": r"HMMA",
    "LDGSTS": r"LDGSTS",
    "LDG": r"LDG",
    "LDSM": r"LDSM",
    "LDS": r"LDS",
    "STS": r"STS",
    "STTM": r"STTM",
    "I2F": r"I2F",
    "F2F": r"F2F",
    "LOP3": r"LOP3",
    "PRMT": r"PRMT",
    "SHF": r"SHF",
    "HALF2": r"HFMA2|HMUL2|HADD2",
    "FLOAT": r"FFMA|FMUL|FADD",
    "ADDRESS": r"IMAD|IADD|LEA|VIADD",
    "BARRIER": r"BAR|SYNCS|WARPSYNC|DEPBAR|LDGDEPBAR|WARPGROUP",
    "LOCAL": r"LDL|STL",
}
_CLASSES = {name: re.compile(pattern) for name, pattern in CLASSES.items()}
MATRIX = ("HGMMA", "UTCMMA", "HMMA")
_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);", re.M)
_TARGET = re.compile(r"0x([0-9a-f]+)")
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


@dataclass(frozen=True)
class Instruction:
    """One line of a listing."""

    address: int
    name: str
    operands: str

    @property
    def kind(self) -> str | None:
        """Its class, None for all others."""
        return next((name for name, p in _CLASSES.items() if p.match(self.name)), None)


@dataclass(frozen=True)
class Figures:
    """See the module's text.

    Attributes:
        registers: of a thread.
        stack: bytes of a thread; spilled registers lie there.
        local: bytes of a thread in memory.
        code: instructions of the kernel.
        loop: those of the loop with the most matrix products; none where no loop has one.
    """

    registers: int
    stack: int
    local: int
    code: tuple[Instruction, ...]
    loop: tuple[Instruction, ...]

    def count(self, kind: str, in_loop: bool = True) -> int:
        """Instructions of a class."""
        return self.counts(in_loop)[kind]

    def counts(self, in_loop: bool = True) -> Counter[str]:
        """Instructions by class."""
        found = self.loop if in_loop else self.code
        return Counter(kind for one in found if (kind := one.kind) is not None)


def figures(code: bytes) -> Figures:
    """The figures of an ELF file that holds one kernel."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(code)
        resources = _RESOURCES.search(_said("--dump-resource-usage", file))
        listing = _said("--dump-sass", file)
    if resources is None:
        raise OptionError("cuobjdump", "no line of resources", "a line REG: ... LOCAL:", "report")
    registers, stack, _, local = map(int, resources.groups())
    lines = tuple(parse(listing))
    return Figures(registers, stack, local, lines, main_loop(lines))


def parse(listing: str) -> list[Instruction]:
    """The instructions of a listing.

    >>> text = "/*0b40*/  @P1 BRA 0x9f0 ;  /* 0xffff */"
    >>> parse(text)
    [Instruction(address=2880, name='BRA', operands='0x9f0')]
    """
    return [
        Instruction(int(m.group(1), 16), m.group(2), m.group(3).strip())
        for m in _LINE.finditer(listing)
    ]


def main_loop(code: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """The instructions between a jump back and where it goes, of the loop with most products.

    Waits may lie behind the code, with a jump back of their own: of loops with equally many
    products the shortest is meant.
    """
    best: tuple[Instruction, ...] = ()
    rank = (0, 0)
    for jump in code:
        target = _TARGET.search(jump.operands) if jump.name.startswith("BRA") else None
        if target is None or int(target.group(1), 16) >= jump.address:
            continue
        start = int(target.group(1), 16)
        body = tuple(one for one in code if start <= one.address <= jump.address)
        found = (sum(one.kind in MATRIX for one in body), -len(body))
        if found[0] and found > rank:
            best, rank = body, found
    return best


def _said(option: str, file: Path) -> str:
    done = subprocess.run([str(_tool()), option, str(file)], capture_output=True, text=True)
    if done.returncode:
        raise OptionError(
            f"cuobjdump {option}", done.stderr.strip(), "a listing", "install triton 3.5 or newer"
        )
    return done.stdout


def _tool() -> Path:
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
