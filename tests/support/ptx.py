"""What lines of PTX compute, on arrays of 32-bit registers.

Only the instructions that the backend writes, from the documentation of the instruction set: a line
with any other is an error. ``lop3`` takes its truth table as the index ``a << 2 | b << 1 | c`` of
each bit; ``prmt`` picks bytes of the eight that two registers hold, by four selectors of 4 bits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Register = npt.NDArray[np.uint32]
_LINE = re.compile(r"^([a-z0-9.]+)\s+(.*)$")


def run(text: str, inputs: Sequence[Register], outputs: int) -> list[Register]:
    """The outputs ``$0``, ``$1``... of a text whose inputs have the numbers after them."""
    known = {f"${outputs + i}": np.asarray(value, np.uint32) for i, value in enumerate(inputs)}
    like = known[f"${outputs}"]
    for line in text.strip().strip("{}").split(";"):
        line = line.strip()
        if not line or line.startswith(".reg"):
            continue
        match = _LINE.match(line)
        assert match, line
        name, operands = match[1], [part.strip() for part in match[2].split(",")]
        values = [known[o] if o in known else _constant(o, like) for o in operands[1:]]
        known[operands[0]] = _INSTRUCTIONS[name](*values)
    return [known[f"${i}"] for i in range(outputs)]


def _constant(text: str, like: Register) -> Register:
    """An immediate: ``0f`` and ``0x`` are hexadecimal, the first of a float32's bits."""
    digits = text[2:] if text.startswith("0f") else text
    return np.full_like(like, int(digits, 16 if text.startswith("0f") else 0))


def _lop3(a: Register, b: Register, c: Register, table: Register) -> Register:
    found = np.zeros_like(a)
    for bit in range(8):
        if int(table[0]) >> bit & 1:
            parts = [v if bit >> place & 1 else ~v for v, place in ((a, 2), (b, 1), (c, 0))]
            found |= parts[0] & parts[1] & parts[2]
    return found


def _prmt(a: Register, b: Register, selectors: Register) -> Register:
    both = b.astype(np.uint64) << np.uint64(32) | a
    found = np.zeros_like(a)
    for place in range(4):
        selector = selectors >> np.uint32(4 * place) & np.uint32(15)
        byte = both >> (np.uint64(8) * (selector & np.uint32(7)).astype(np.uint64)) & np.uint64(255)
        sign = np.where(byte >> np.uint64(7), np.uint64(255), np.uint64(0))
        chosen = np.where(selector >> np.uint32(3), sign, byte).astype(np.uint32)
        found |= chosen << np.uint32(8 * place)
    return found


def _add(a: Register, b: Register) -> Register:
    return (a.view(np.float32) + b.view(np.float32)).view(np.uint32)


_INSTRUCTIONS: dict[str, Callable[..., Register]] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
    "lop3.b32": _lop3,
    "prmt.b32": _prmt,
    "add.f32": _add,
}
