"""Words to weights: one plane of a tile at a time.

Comes in: words of a block as loaded, a plane's number, the coding as constants. Goes out: what the
codes stand for before scaling, exactly, as float16 or bfloat16.
Always holds: integers up to 256 in size and floats of 8 bits are exact in both.

``KIND`` is 0 for codes, 1 for a table, 2 for floats of 8 bits, 3 for twice floats of 4 bits.
``FORM`` is 0 for *symmetric*, 1 for *zero*, 2 for *offset*, whose codes come out as they are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qcompile.backends.cuda.jit.bits import (
    field,
    is_bfloat16,
    magic,
    mantissa,
    merge,
    offset_of,
    shift_of,
)
from qcompile.backends.cuda.jit.bytes import byte, looked_up, narrow_float, signed, table_byte


@triton.jit
def prepared(word, KIND: tl.constexpr, TABLE: tl.constexpr, BF16: tl.constexpr, ASM: tl.constexpr):
    """What all planes of a word share."""
    if KIND == 1:
        return looked_up(word, TABLE, BF16, ASM)
    else:
        return word


@triton.constexpr_function
def _factor(kind, offset, dtype):
    """What a number is multiplied by, so that steps of the code are 1."""
    if kind == 2:
        return 2.0**120 if dtype == tl.bfloat16 else 2.0**8
    if kind == 3:
        return 2.0**127 if dtype == tl.bfloat16 else 2.0**15
    return 2.0**-offset


@triton.constexpr_function
def _bias(kind, low, offset, dtype):
    """What is then subtracted to get the code itself."""
    if kind >= 2:
        return 0.0
    if dtype == tl.bfloat16 and (kind == 1 or low == 8):
        return -128.0
    return 2.0 ** (mantissa(dtype) - offset)


@triton.constexpr_function
def _offset(kind, plane, low, high, dtype):
    return offset_of(plane, low, high, dtype) if kind == 0 and low < 8 else 0


@triton.jit
def _number(
    word,
    high,
    P: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    KIND: tl.constexpr,
    DT: tl.constexpr,
    ASM: tl.constexpr,
):
    """A plane's codes as numbers that ``_factor`` and ``_bias`` set right.

    P counts planes of the block; ``word`` is the one that holds plane P.
    """
    BF16: tl.constexpr = is_bfloat16(DT)
    Q: tl.constexpr = P % (16 // LOW)
    if KIND == 1:
        bits = table_byte(word, Q, BF16, ASM)
        if BF16:
            return signed(bits, ASM)
    elif KIND >= 2:
        bits = narrow_float(word, Q, LOW, BF16, ASM)
    elif BF16 and LOW == 8:
        bits = byte(word, Q, ASM)
    else:
        OFF: tl.constexpr = offset_of(Q, LOW, HIGH, DT)
        bits = field(word, shift_of(Q, LOW, HIGH, DT), ((1 << LOW) - 1) << OFF, magic(DT), ASM)
        if HIGH != 0:
            TOP: tl.constexpr = OFF + LOW
            bits = merge(high, bits, P * HIGH - TOP, ((1 << HIGH) - 1) << TOP, ASM)
    return bits.to(DT, bitcast=True)


@triton.jit
def decoded(
    word,
    high,
    zero,
    P: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    KIND: tl.constexpr,
    FORM: tl.constexpr,
    CENTER: tl.constexpr,
    DT: tl.constexpr,
    ASM: tl.constexpr,
):
    """Plane P of a tile ``[rows, width]``: code less zero, code less ``CENTER``, or the code.

    Args:
        word: what ``prepared`` gave for the words that hold the plane.
        high: words of high bits, where ``HIGH`` is not 0.
        zero: DT ``[rows]`` for the form *zero*, else anything.
    """
    OFF: tl.constexpr = _offset(KIND, P % (16 // LOW), LOW, HIGH, DT)
    BIAS: tl.constexpr = _bias(KIND, LOW, OFF, DT)
    FACTOR: tl.constexpr = _factor(KIND, OFF, DT)
    number = _number(word, high, P, LOW, HIGH, KIND, DT, ASM)
    if FACTOR != 1.0:
        number = number * FACTOR
    if FORM == 1:
        return number - (zero + BIAS)[:, None]
    elif FORM == 2:
        return number - BIAS
    elif BIAS + CENTER != 0.0:
        return number - (BIAS + CENTER)
    else:
        return number
