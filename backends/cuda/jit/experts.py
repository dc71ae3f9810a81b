"""Products of rows sorted by expert, the function between them, the weighted sum.

Comes in: planar weights ``[E, ...]``, places in blocks of one expert each. Goes out: float32 sums
for every choice, rows of what is between the products, rows of tokens.
Always holds: a block of places reads the weights of its own expert and of no other; a block beyond
the places in use does nothing. Parts of K, and choices of a token, add up in one fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qcompile.backends.cuda.jit.linear import accumulated, planes_of


# Numbers of choices are no reason to compile again.
@triton.jit(do_not_specialize=["total", "top"])
def products(
    x,
    rows,
    owners,
    used,
    codes,
    high,
    scale,
    shift,
    bias,
    y,
    total,
    top,
    N,
    K,
    groups,
    blocks,
    x_stride,
    bias_stride,
    y_stride,
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
    K_WHOLE: tl.constexpr,
    ASM: tl.constexpr,
):
    """A tile of part ``program_id(2)`` of ``y`` float32 ``[PARTS, total, N]``.

    Args:
        x: ``[total / top, K]``: rows of choice r are those of row ``r // top``.
        rows, owners, used: see ``Routing``; ``rows`` holds ``total`` where there is no choice.
        codes, high, scale, shift: all experts', one behind the other.
        bias: ``[E, N]``; the first part adds it.
    """
    place = tl.program_id(1) * BM
    if place >= tl.load(used):
        return
    expert = tl.load(owners + tl.program_id(1)).to(tl.int64)
    row = tl.load(rows + place + tl.arange(0, BM))
    rows_in = row < total
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    n_in = n < N
    part = tl.program_id(2)
    share = tl.cdiv(blocks, PARTS)
    first = part * share
    high_size = tl.cast(blocks, tl.int64) * N * WIDTH
    vector_size = tl.cast(groups, tl.int64) * N
    sums = accumulated(
        x + (row // top).to(tl.int64) * x_stride,
        rows_in,
        codes + expert * (high_size * (planes_of(LOW, HIGH) * LOW // 16)),
        high + expert * high_size,
        scale + expert * vector_size,
        shift + expert * vector_size,
        # Outputs that there are not read the last one's weights: masks would take registers.
        tl.minimum(n, N - 1),
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
    if HAS_BIAS:  # noqa: SIM102 - this is known when the kernel is compiled, the other is not
        if part == 0:
            added = tl.load(bias + expert * bias_stride + n, mask=n_in, other=0.0)
            sums += added.to(tl.float32)[:, None]
    at = y + (tl.cast(total, tl.int64) * part + row)[None, :] * y_stride + n[:, None]
    tl.store(at, sums, mask=rows_in[None, :] & n_in[:, None])


@triton.jit
def function_of(x, FUNCTION: tl.constexpr):
    """The functions of ``qcompile.activation``, float32; one that is no number stays none."""
    if FUNCTION == "silu":
        return x * tl.sigmoid(x)
    elif FUNCTION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif FUNCTION == "gelu_tanh":
        # (1 + tanh(u)) / 2 is the logistic function of 2 u.
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif FUNCTION == "relu":
        return tl.where(x < 0.0, 0.0, x)
    elif FUNCTION == "relu2":
        return tl.where(x < 0.0, 0.0, x * x)
    elif FUNCTION == "sigmoid":
        return tl.sigmoid(x)
    elif FUNCTION == "tanh":
        return 2.0 * tl.sigmoid(2.0 * x) - 1.0
    else:
        tl.static_assert(FUNCTION == "identity")
        return x


@triton.jit
def activated(gate, up, FUNCTION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """What an expert with a gate has between its products."""
    if LIMIT is not None:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    if FUNCTION == "swiglu_oai":
        return (up + 1.0) * gate * tl.sigmoid(gate * ALPHA)
    else:
        return function_of(gate, FUNCTION) * up


@triton.jit(do_not_specialize=["total"])
def between(
    sums,
    hidden,
    total,
    inner,
    BN: tl.constexpr,
    PARTS: tl.constexpr,
    FUNCTION: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """A row of ``hidden [total, inner]`` from ``sums`` float32 ``[PARTS, total, inner or twice]``.

    With a gate a row of ``sums`` is gate, then up, or both in turns.
    """
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    n_in = n < inner
    width = inner * 2 if GATED else inner
    gate_at = sums + row * width + (n * 2 if INTERLEAVED else n)
    up_at = gate_at + (1 if INTERLEAVED else inner)
    gate = tl.zeros((BN,), dtype=tl.float32)
    up = tl.zeros((BN,), dtype=tl.float32)
    for part in tl.static_range(PARTS):
        further = tl.cast(total, tl.int64) * width * part
        gate += tl.load(gate_at + further, mask=n_in, other=0.0)
        if GATED:
            up += tl.load(up_at + further, mask=n_in, other=0.0)
    value = activated(gate, up, FUNCTION, ALPHA, LIMIT) if GATED else function_of(gate, FUNCTION)
    tl.store(hidden + row * inner + n, value.to(hidden.dtype.element_ty), mask=n_in)


@triton.jit(do_not_specialize=["total", "top"])
def combined(
    sums,
    shares,
    out,
    total,
    top,
    N,
    BN: tl.constexpr,
    PARTS: tl.constexpr,
):
    """A row of ``out [total / top, N]``: the weighted sum of ``top`` rows of ``sums``."""
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    n_in = n < N
    value = tl.zeros((BN,), dtype=tl.float32)
    for choice in range(top):
        row = token * top + choice
        whole = tl.zeros((BN,), dtype=tl.float32)
        for part in tl.static_range(PARTS):
            at = sums + (tl.cast(total, tl.int64) * part + row) * N + n
            whole += tl.load(at, mask=n_in, other=0.0)
        value += tl.load(shares + row).to(tl.float32) * whole
    tl.store(out + token * N + n, value.to(out.dtype.element_ty), mask=n_in)
