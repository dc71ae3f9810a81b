# mypy: ignore-errors
"""Kernels of one plain line each: what stands beside a line of PTX, over all words of 16 bits."""

from __future__ import annotations

import triton  # noqa: TID251 - the plain lines are Triton
import triton.language as tl  # noqa: TID251

from qcompile.backends.cuda.jit import bits, bytes

FLOATS = {False: tl.float16, True: tl.bfloat16}


@triton.jit
def plain_field(words, out, SHIFT: tl.constexpr, MASK: tl.constexpr, BITS: tl.constexpr):
    i = tl.program_id(0) * 4096 + tl.arange(0, 4096)
    tl.store(out + i, bits.field(tl.load(words + i), SHIFT, MASK, BITS, False))


@triton.jit
def plain_merge(words, others, out, SHIFT: tl.constexpr, MASK: tl.constexpr):
    i = tl.program_id(0) * 4096 + tl.arange(0, 4096)
    found = bits.merge(tl.load(words + i), tl.load(others + i), SHIFT, MASK, False)
    tl.store(out + i, found)


@triton.jit
def plain_byte(words, out, P: tl.constexpr):
    i = tl.program_id(0) * 4096 + tl.arange(0, 4096)
    tl.store(out + i, bytes.byte(tl.load(words + i), P, False))


@triton.jit
def plain_float(words, out, P: tl.constexpr, BITS: tl.constexpr, BF16: tl.constexpr):
    i = tl.program_id(0) * 4096 + tl.arange(0, 4096)
    tl.store(out + i, bytes.narrow_float(tl.load(words + i), P, BITS, BF16, False))


@triton.jit
def plain_table(words, out, TABLE: tl.constexpr, BF16: tl.constexpr):
    i = tl.program_id(0) * 64 + tl.arange(0, 64)
    at = i[:, None] * 64 + tl.arange(0, 64)[None, :]
    tl.store(out + at, bytes.looked_up(tl.load(words + at), TABLE, BF16, False))


@triton.jit
def plain_table_byte(values, out, P: tl.constexpr, BF16: tl.constexpr):
    i = tl.program_id(0) * 4096 + tl.arange(0, 4096)
    tl.store(out + i, bytes.table_byte(tl.load(values + i), P, BF16, False))


@triton.jit
def plain_signed(values, out):
    i = tl.program_id(0) * 4096 + tl.arange(0, 4096)
    tl.store(out + i, bytes.signed(tl.load(values + i), False).to(tl.int16, bitcast=True))
