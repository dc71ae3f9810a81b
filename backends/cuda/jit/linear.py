"""``y = x @ w.T + bias`` over the planar layout.

Comes in: pointers, sizes, the coding and the tile as constants. Goes out: y, or float32 sums over
parts of K that ``reduce_parts`` adds in one fixed order.
Always holds: weights are the matrix unit's first operand, which it takes from registers, where they
were decoded; rows of the input are its columns. Loads outside M, N and K are masked, and padded
columns multiply inputs that are 0. Sums are float32.

With ``ON_SUM`` scales multiply sums of a group: codes less zero go into the product exactly. Else
they multiply the weights, in 16 bits, which costs less where a tile has more rows of input.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qcompile.backends.cuda.jit.bits import is_bfloat16
from qcompile.backends.cuda.jit.decode import decoded, prepared


@triton.constexpr_function
def planes_of(LOW, HIGH):
    """Planes of a block."""
    return 16 // (LOW if HIGH == 0 else HIGH)


@triton.jit
def vector(pointer, group, n, n_in, N, WHOLE: tl.constexpr):
    """The entries of one group for some outputs: ``[G, N]`` at ``group``."""
    at = pointer + group * N + n
    if WHOLE:
        return tl.load(at)
    else:
        return tl.load(at, mask=n_in, other=0.0)


@triton.jit
def words_at(pointer, block, n, n_in, N, WIDTH: tl.constexpr, WHOLE: tl.constexpr):
    """The words ``[rows, WIDTH]`` of some outputs: ``[blocks, N, WIDTH]`` at ``block``."""
    base = pointer + tl.cast(block, tl.int64) * N * WIDTH
    at = base + n[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    if WHOLE:
        return tl.load(at)
    else:
        return tl.load(at, mask=n_in[:, None], other=0)


@triton.jit
def inputs_at(x_rows, rows_in, column, K, WIDTH: tl.constexpr, WHOLE: tl.constexpr):
    """Columns ``column`` to ``column + WIDTH`` of some rows of the input, 0 outside of K."""
    columns = column + tl.arange(0, WIDTH)
    at = x_rows[:, None] + columns[None, :]
    if WHOLE:
        return tl.load(at, mask=rows_in[:, None], other=0.0)
    else:
        return tl.load(at, mask=rows_in[:, None] & (columns < K)[None, :], other=0.0)


@triton.jit
def group_at(
    block, P: tl.constexpr, PLANES: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr
):
    """The group of a plane."""
    if GROUP == 0:
        return 0
    elif (PLANES * WIDTH) % GROUP == 0:
        return block * (PLANES * WIDTH // GROUP) + P * WIDTH // GROUP
    else:
        return (block * (PLANES * WIDTH) + P * WIDTH) // GROUP


@triton.jit
def accumulated(
    x_rows,
    rows_in,
    codes,
    high,
    scale,
    shift,
    n,
    n_in,
    N,
    K,
    groups,
    first,
    last,
    BM: tl.constexpr,
    BN: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    KIND: tl.constexpr,
    FORM: tl.constexpr,
    CENTER: tl.constexpr,
    TABLE: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    RUN: tl.constexpr,
    ON_SUM: tl.constexpr,
    N_WHOLE: tl.constexpr,
    K_WHOLE: tl.constexpr,
    ASM: tl.constexpr,
):
    """The products ``[BN, BM]`` of some outputs and some rows over the blocks first to last.

    Args:
        x_rows: pointers to the first column of each row, ``[BM]``.
        rows_in: which rows there are.
        codes, high, scale, shift: the parts of one weight; ``shift`` is its zero or its offset.
        n, n_in: the outputs ``[BN]``, and which of them there are.
        N, K, groups: sizes of the weight.
        first, last: blocks of K.
    """
    PLANES: tl.constexpr = planes_of(LOW, HIGH)
    DT: tl.constexpr = scale.dtype.element_ty
    # float32 where the interpreter computes without rounding, else the same.
    CT: tl.constexpr = x_rows.dtype.element_ty
    sums = tl.zeros((BN, BM), dtype=tl.float32)
    part = tl.zeros((BN, BM), dtype=tl.float32)
    if GROUP == 0:
        s = vector(scale, 0, n, n_in, N, N_WHOLE)
        z = s
        if FORM != 0:
            z = vector(shift, 0, n, n_in, N, N_WHOLE)
    for block in range(first, last):
        v = tl.zeros((BN, WIDTH), dtype=tl.int16)
        if HIGH != 0:
            v = words_at(high, block, n, n_in, N, WIDTH, N_WHOLE)
        for p in tl.static_range(PLANES):
            if p * LOW % 16 == 0:
                at = block * (PLANES * LOW // 16) + p * LOW // 16
                word = words_at(codes, at, n, n_in, N, WIDTH, N_WHOLE)
                w = prepared(word, KIND, TABLE, is_bfloat16(DT), ASM)
            if GROUP != 0 and p % RUN == 0:
                # The last block may be padded with groups that do not exist.
                g = tl.minimum(group_at(block, p, PLANES, WIDTH, GROUP), groups - 1)
                s = vector(scale, g, n, n_in, N, N_WHOLE)
                z = s
                if FORM != 0:
                    z = vector(shift, g, n, n_in, N, N_WHOLE)
            x = inputs_at(x_rows, rows_in, (block * PLANES + p) * WIDTH, K, WIDTH, K_WHOLE)
            q = decoded(w, v, z, p, LOW, HIGH, KIND, FORM, CENTER, DT, ASM)
            if ON_SUM:
                if GROUP == 0:
                    sums = tl.dot(q.to(CT), tl.trans(x), sums, input_precision="ieee")
                else:
                    if p % RUN == 0:
                        part = tl.dot(q.to(CT), tl.trans(x), input_precision="ieee")
                    else:
                        part = tl.dot(q.to(CT), tl.trans(x), part, input_precision="ieee")
                    if p % RUN == RUN - 1:
                        sums += part * s.to(tl.float32)[:, None]
            else:
                weight = q.to(CT) * s.to(CT)[:, None]
                if FORM == 2:
                    weight += z.to(CT)[:, None]
                sums = tl.dot(weight, tl.trans(x), sums, input_precision="ieee")
    if ON_SUM and GROUP == 0:
        sums *= s.to(tl.float32)[:, None]
    return sums


# A number of rows is no reason to compile again.
@triton.jit(do_not_specialize=["M"])
def linear(
    x,
    codes,
    high,
    scale,
    shift,
    bias,
    y,
    M,
    N,
    K,
    groups,
    blocks,
    x_stride,
    BM: tl.constexpr,
    BN: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    KIND: tl.constexpr,
    FORM: tl.constexpr,
    CENTER: tl.constexpr,
    TABLE: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    RUN: tl.constexpr,
    ON_SUM: tl.constexpr,
    N_WHOLE: tl.constexpr,
    K_WHOLE: tl.constexpr,
    ASM: tl.constexpr,
):
    """One tile of ``y [M, N]``, or of part ``program_id(2)`` of ``y`` float32 ``[PARTS, M, N]``."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    part = tl.program_id(2)
    n_in = n < N
    rows_in = m < M
    share = tl.cdiv(blocks, PARTS)
    first = part * share
    # Outputs that there are not read the last one's weights: masks would take registers.
    at_n = n if N_WHOLE else tl.minimum(n, N - 1)
    sums = accumulated(
        x + m.to(tl.int64) * x_stride,
        rows_in,
        codes,
        high,
        scale,
        shift,
        at_n,
        n_in,
        N,
        K,
        groups,
        first,
        tl.minimum(first + share, blocks),
        BM,
        BN,
        LOW,
        HIGH,
        KIND,
        FORM,
        CENTER,
        TABLE,
        WIDTH,
        GROUP,
        RUN,
        ON_SUM,
        True,
        K_WHOLE,
        ASM,
    )
    if HAS_BIAS:
        sums += tl.load(bias + n, mask=n_in, other=0.0).to(tl.float32)[:, None]
    at = y + (part * M + m).to(tl.int64)[None, :] * N + n[:, None]
    tl.store(at, sums.to(y.dtype.element_ty), mask=rows_in[None, :] & n_in[:, None])


@triton.jit
def reduce_parts(
    parts, bias, y, N, stride, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, BN: tl.constexpr
):
    """``y [M, N]`` from ``parts`` float32 ``[PARTS, M, N]``, added from the first to the last."""
    m = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    n_in = n < N
    at = parts + m.to(tl.int64) * N + n
    sums = tl.zeros((BN,), dtype=tl.float32)
    for part in tl.static_range(PARTS):
        sums += tl.load(at + part * stride, mask=n_in, other=0.0)
    if HAS_BIAS:
        sums += tl.load(bias + n, mask=n_in, other=0.0).to(tl.float32)
    tl.store(y + m.to(tl.int64) * N + n, sums.to(y.dtype.element_ty), mask=n_in)
