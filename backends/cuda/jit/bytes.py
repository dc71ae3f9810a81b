"""From bytes to numbers of 16 bits: codes of 8 bits, values of a table, narrow floats.

Comes in: a tile of words, int16. Goes out: a tile of float16 or bfloat16.
Always holds: as in ``bits``, each line of PTX has a plain twin with the same bits.

bfloat16 has 7 mantissa bits, so a byte does not fit among them: it is set into a float32, 128 is
subtracted, and the upper half of the result, which holds all of it, is the bfloat16.

A table has 16 values from -127 to 127: four codes of a word are looked up at once by three
``prmt``, which picks bytes of two registers by the nibbles of a third.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qcompile.backends.cuda.jit.bits import field


@triton.constexpr_function
def byte_asm(place):
    """A byte of both words of a register, less 128, as two bfloat16.

    ``0x4B000000`` is 2**23, ``0xCB000080`` is -(2**23 + 128).
    """
    return (
        "{ .reg .b32 t<2>; .reg .f32 f<2>; "
        f"prmt.b32 t0, $1, 0x4B000000, {0x7440 + place}; "
        f"prmt.b32 t1, $1, 0x4B000000, {0x7440 + place + 2}; "
        "mov.b32 f0, t0; mov.b32 f1, t1; "
        "add.f32 f0, f0, 0fCB000080; add.f32 f1, f1, 0fCB000080; "
        "mov.b32 t0, f0; mov.b32 t1, f1; prmt.b32 $0, t0, t1, 0x7632; }"
    )


@triton.jit
def byte(word, P: tl.constexpr, ASM: tl.constexpr):
    """Byte P of a word less 128, as the bits of a bfloat16."""
    if ASM:
        return tl.inline_asm_elementwise(
            byte_asm(P), "=r,r", [word], dtype=tl.int16, is_pure=True, pack=2
        )
    else:
        code = ((word >> (8 * P)) & 0xFF).to(tl.float32) - 128.0
        return (code.to(tl.int32, bitcast=True) >> 16).to(tl.int16)


@triton.constexpr_function
def float_shifts(plane, bits, bf16):
    """How far to the left exponent and mantissa of a narrow float go, and its sign.

    A ``float8_e4m3fn`` has 3 mantissa bits, a float of 4 bits (E2M1) has 1.
    """
    mantissa = 3 if bits == 8 else 1
    return (7 if bf16 else 10) - mantissa - bits * plane, 16 - bits - bits * plane


@triton.constexpr_function
def float_mask(bits, bf16):
    """The bits below the sign, where they go."""
    mantissa = 3 if bits == 8 else 1
    return ((1 << (bits - 1)) - 1) << ((7 if bf16 else 10) - mantissa)


@triton.constexpr_function
def float_asm(plane, bits, bf16):
    """A narrow float of both words: sign and the rest moved to where 16 bits have them."""
    rest, sign = float_shifts(plane, bits, bf16)
    code = "{ .reg .b32 a; .reg .b32 b; "
    for name, shift in (("a", rest), ("b", sign)):
        way = f"shl.b32 {name}, $1, {shift}; " if shift >= 0 else f"shr.u32 {name}, $1, {-shift}; "
        code += way
    return (
        code + f"and.b32 a, a, {float_mask(bits, bf16) * 0x10001}; "
        "lop3.b32 $0, b, 0x80008000, a, 0xEA; }"
    )


@triton.jit
def narrow_float(word, P: tl.constexpr, BITS: tl.constexpr, BF16: tl.constexpr, ASM: tl.constexpr):
    """Plane P of a word, floats of 8 or 4 bits, as the bits of them times a power of two.

    The factor is the difference of the biases: ``2**-8`` and ``2**-120`` for ``float8_e4m3fn``,
    ``2**-14`` and ``2**-126`` for E2M1, in float16 and bfloat16.
    """
    if ASM:
        return tl.inline_asm_elementwise(
            float_asm(P, BITS, BF16), "=r,r", [word], dtype=tl.int16, is_pure=True, pack=2
        )
    else:
        code = word >> (BITS * P)
        rest = code & ((1 << (BITS - 1)) - 1)
        rest = rest << (((7 if BF16 else 10) - 3) if BITS == 8 else ((7 if BF16 else 10) - 1))
        sign = (code & (1 << (BITS - 1))) << (16 - BITS)
        return (rest | sign).to(tl.int16)


# **** tables ****


@triton.constexpr_function
def table_bytes(table, bf16):
    """What the lookup gives: a value with 128 added, or its size with the sign as the top bit."""
    return tuple(abs(v) | (v < 0) << 7 if bf16 else v + 128 for v in table)


@triton.constexpr_function
def _joined(bytes, first, count):
    """Some bytes as a number, signed where they are eight."""
    value = sum(b << (8 * place) for place, b in enumerate(bytes[first : first + count]))
    return value - (1 << 64) if value >> 63 else value


@triton.constexpr_function
def table_asm(bytes):
    """For both words of a register four bytes each: those of their four codes.

    The lower three bits of a code pick one of eight bytes, in both halves of the table; the fourth
    bit picks the half. A selector's own fourth bit would repeat a sign, so it is cut off first.
    """
    t = [_joined(bytes, 4 * i, 4) for i in range(4)]
    one = f"prmt.b32 a, {t[0]}, {t[1]}, m; prmt.b32 b, {t[2]}, {t[3]}, m; prmt.b32 ${{}}, a, b, s; "
    return (
        "{ .reg .b32 m; .reg .b32 s; .reg .b32 a; .reg .b32 b; "
        "and.b32 m, $2, 0x77777777; shr.u32 s, $2, 1; "
        "lop3.b32 s, s, 0x44444444, 0x32103210, 0xEA; "
        + one.format(0)
        + "shr.u32 m, m, 16; shr.u32 s, s, 16; "
        + one.format(1)
        + "}"
    )


@triton.constexpr_function
def table_byte_asm(place, bf16):
    """One byte of two registers: as 1024 + it in float16; for bfloat16 twice, in both halves."""
    if bf16:
        return f"prmt.b32 $0, $1, $2, {(4 + place) * 0x1100 + place * 0x11};"
    return (
        "{ .reg .b32 t; "
        f"prmt.b32 t, $1, $2, {(4 + place) << 8 | place}; "
        "lop3.b32 $0, t, 0x00FF00FF, 0x64006400, 0xEA; }"
    )


@triton.jit
def looked_up(word, TABLE: tl.constexpr, BF16: tl.constexpr, ASM: tl.constexpr):
    """The four codes of a word, looked up in ``table_bytes``: int32 with a byte for each."""
    BYTES: tl.constexpr = table_bytes(TABLE, BF16)
    if ASM:
        return tl.inline_asm_elementwise(
            table_asm(BYTES), "=r,=r,r", [word], dtype=tl.int32, is_pure=True, pack=2
        )
    else:
        low = tl.full((1, 1), _joined(BYTES, 0, 8), tl.int64)
        high = tl.full((1, 1), _joined(BYTES, 8, 8), tl.int64)
        found = tl.zeros_like(word).to(tl.int32)
        for p in tl.static_range(4):
            code = (word >> (4 * p)).to(tl.int64) & 15
            value = (tl.where(code >= 8, high, low) >> ((code & 7) * 8)) & 0xFF
            found |= value.to(tl.int32) << (8 * p)
        return found


@triton.jit
def table_byte(bytes, P: tl.constexpr, BF16: tl.constexpr, ASM: tl.constexpr):
    """Byte P as the bits of ``1024 + byte`` in float16; for bfloat16 in both halves of 16 bits."""
    if ASM:
        return tl.inline_asm_elementwise(
            table_byte_asm(P, BF16), "=r,r,r", [bytes], dtype=tl.int16, is_pure=True, pack=2
        )
    else:
        value = (bytes >> (8 * P)) & 0xFF
        if BF16:
            return (value | value << 8).to(tl.int16)
        else:
            return (value | 0x6400).to(tl.int16)


@triton.jit
def signed(byte, ASM: tl.constexpr):
    """The bfloat16 whose size is the lower half's seven bits, its sign the top bit.

    ``0x4300 | size`` is 128 + size: with the sign, less 128 with the sign.
    """
    large = field(byte, 0, 0x807F, 0x4300, ASM).to(tl.bfloat16, bitcast=True)
    return large - field(byte, 0, 0x8000, 0x4300, ASM).to(tl.bfloat16, bitcast=True)
