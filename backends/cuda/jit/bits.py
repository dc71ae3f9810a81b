"""From words of 16 bits to numbers of 16 bits, two at a time.

Comes in: a tile of words, int16. Goes out: a tile of float16 or bfloat16.
Always holds: with ``ASM`` one instruction of PTX does what the plain line beside it says, to the
bit; the plain line is what the interpreter runs and what other vendors' devices get.

A code q becomes a number by setting it among the mantissa bits of a *magic* number with unit
steps: ``0x6400 | q`` is the float16 1024 + q, ``0x4300 | q`` the bfloat16 128 + q. A code that lies
``off`` bits up in the mantissa gives ``magic + q * 2**off``: the factor is undone for nothing in
the multiply-add that subtracts the magic number. So one shift serves all planes that fit.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def is_bfloat16(dtype):
    """Whether numbers have 7 mantissa bits instead of 10."""
    return dtype == tl.bfloat16


@triton.constexpr_function
def mantissa(dtype):
    """Bits below the leading one."""
    return 7 if dtype == tl.bfloat16 else 10


@triton.constexpr_function
def magic(dtype):
    """The bits of ``2**mantissa``, to which codes are added."""
    return 0x4300 if dtype == tl.bfloat16 else 0x6400


@triton.constexpr_function
def shift_of(plane, low, high, dtype):
    """How far words are shifted for a plane's low bits; several planes share a shift."""
    per_shift = (mantissa(dtype) - low - high) // low + 1
    return plane // per_shift * per_shift * low


@triton.constexpr_function
def offset_of(plane, low, high, dtype):
    """Where the lowest bit of a plane's code then lies in the mantissa."""
    return plane * low - shift_of(plane, low, high, dtype)


@triton.constexpr_function
def _pair(value):
    return value * 0x10001


@triton.constexpr_function
def _signed(bits):
    """16 bits as the number that an int16 with them is."""
    return bits - (1 << 16) if bits >> 15 else bits


@triton.constexpr_function
def field_asm(shift, mask, bits):
    """``word >> shift & mask | bits`` in both halves; ``0xEA`` is ``(a & b) | c``."""
    last = f"lop3.b32 $0, {{0}}, {_pair(mask)}, {_pair(bits)}, 0xEA;"
    if shift == 0:
        return last.format("$1")
    return "{ .reg .b32 t; shr.u32 t, $1, " + str(shift) + "; " + last.format("t") + " }"


@triton.constexpr_function
def merge_asm(shift, mask):
    """``word >> shift & mask | other`` in both halves; a negative shift goes left."""
    last = f"lop3.b32 $0, {{0}}, {_pair(mask)}, $2, 0xEA;"
    if shift == 0:
        return last.format("$1")
    way = "shr.u32" if shift > 0 else "shl.b32"
    return "{ .reg .b32 t; " + f"{way} t, $1, {abs(shift)}; " + last.format("t") + " }"


@triton.jit
def field(word, SHIFT: tl.constexpr, MASK: tl.constexpr, MAGIC: tl.constexpr, ASM: tl.constexpr):
    """Some bits of a word among the bits of a magic number, int16."""
    if ASM:
        return tl.inline_asm_elementwise(
            field_asm(SHIFT, MASK, MAGIC), "=r,r", [word], dtype=tl.int16, is_pure=True, pack=2
        )
    else:
        return (((word >> SHIFT) & _signed(MASK)) | MAGIC).to(tl.int16)


@triton.jit
def merge(word, other, SHIFT: tl.constexpr, MASK: tl.constexpr, ASM: tl.constexpr):
    """Some bits of a word, shifted to the right or to the left, beside those of another, int16."""
    if ASM:
        return tl.inline_asm_elementwise(
            merge_asm(SHIFT, MASK), "=r,r,r", [word, other], dtype=tl.int16, is_pure=True, pack=2
        )
    elif SHIFT >= 0:
        return (((word >> SHIFT) & MASK) | other).to(tl.int16)
    else:
        return (((word << -SHIFT) & MASK) | other).to(tl.int16)
