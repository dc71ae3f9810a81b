"""Rows of a planar weight as floats.

Comes in: the parts of a weight, and which rows. Goes out: ``[R, K]``, each value rounded once from
float32.
Always holds: only the words of those rows are read; a row that does not exist is NaN throughout.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qcompile.backends.cuda.jit.bits import is_bfloat16
from qcompile.backends.cuda.jit.decode import decoded, prepared
from qcompile.backends.cuda.jit.linear import group_at, planes_of, vector, words_at


@triton.jit(do_not_specialize=["R", "start"])
def rows(
    ids,
    codes,
    high,
    scale,
    shift,
    out,
    R,
    N,
    K,
    groups,
    start,
    BR: tl.constexpr,
    GATHER: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    KIND: tl.constexpr,
    FORM: tl.constexpr,
    CENTER: tl.constexpr,
    TABLE: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    ASM: tl.constexpr,
):
    """One block of K of ``BR`` rows: those that ``ids`` names, or those from ``start`` on."""
    PLANES: tl.constexpr = planes_of(LOW, HIGH)
    DT: tl.constexpr = scale.dtype.element_ty
    block = tl.program_id(1)
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    r_in = r < R
    n = start + r
    if GATHER:
        n = tl.load(ids + r, mask=r_in, other=0).to(tl.int32)
    n_in = r_in & (n >= 0) & (n < N)
    j = tl.arange(0, WIDTH)
    at = out + r.to(tl.int64)[:, None] * K
    v = tl.zeros((BR, WIDTH), dtype=tl.int16)
    if HIGH != 0:
        v = words_at(high, block, n, n_in, N, WIDTH, False)
    for p in tl.static_range(PLANES):
        if p * LOW % 16 == 0:
            word = words_at(
                codes, block * (PLANES * LOW // 16) + p * LOW // 16, n, n_in, N, WIDTH, False
            )
            w = prepared(word, KIND, TABLE, is_bfloat16(DT), ASM)
        g = tl.minimum(group_at(block, p, PLANES, WIDTH, GROUP), groups - 1)
        s = vector(scale, g, n, n_in, N, False)
        z = s
        if FORM != 0:
            z = vector(shift, g, n, n_in, N, False)
        q = decoded(w, v, z, p, LOW, HIGH, KIND, FORM, CENTER, DT, ASM)
        value = q.to(tl.float32) * s.to(tl.float32)[:, None]
        if FORM == 2:
            value += z.to(tl.float32)[:, None]
        if GATHER:
            value = tl.where(n_in[:, None], value, float("nan"))
        k = (block * PLANES + p) * WIDTH + j
        tl.store(
            at + k[None, :],
            value.to(out.dtype.element_ty),
            mask=r_in[:, None] & (k < K)[None, :],
        )
