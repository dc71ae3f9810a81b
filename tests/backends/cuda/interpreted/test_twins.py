"""Every line of PTX beside its plain twin, over all words of 16 bits.

PTX never runs here: a model of its instructions does. The plain lines run in the interpreter, as
kernels do.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from support.plain_lines import (
    FLOATS,
    plain_byte,
    plain_field,
    plain_float,
    plain_merge,
    plain_signed,
    plain_table,
    plain_table_byte,
)
from support.ptx import Register, run

from qcompile.backends.cuda.coding import E2M1_TWICE
from qcompile.backends.cuda.interpreter import enable_bfloat16
from qcompile.backends.cuda.jit import bits, bytes

enable_bfloat16()

Words = npt.NDArray[np.uint16]
ALL = np.arange(1 << 16).astype(np.uint16)
# The other half of a register: every word once more, in another order.
OTHER = np.random.default_rng(0).permutation(ALL)
SPLITS = ((2, 0), (2, 1), (4, 0), (4, 1), (4, 2), (8, 0))
TABLES = (
    (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    tuple(range(-127, -111)),
    E2M1_TWICE,
)


def plain(
    kernel: object, *inputs: Words | Register, wide: bool = False, **constants: object
) -> npt.NDArray[np.unsignedinteger]:
    """What a plain line makes of words, as unsigned numbers."""
    tensors = [torch.from_numpy(i.view(np.int16 if i.itemsize == 2 else np.int32)) for i in inputs]
    out = torch.empty(1 << 16, dtype=torch.int32 if wide else torch.int16)
    kernel[(16,)](*tensors, out, **constants)  # type: ignore[index]
    numbers: npt.NDArray[np.unsignedinteger] = out.numpy().view(np.uint32 if wide else np.uint16)
    return numbers


def in_pairs(low: Words, high: Words) -> Register:
    """Registers of two words each."""
    pairs: Register = low.astype(np.uint32) | high.astype(np.uint32) << np.uint32(16)
    return pairs


def check(found: Register, low: Words, high: Words) -> None:
    assert (found & np.uint32(0xFFFF) == low).all()
    assert (found >> np.uint32(16) == high).all()


# Bytes have lines of their own for bfloat16.
FIELDS = [(*split, bf16) for split in SPLITS for bf16 in (False, True) if split[0] < 8 or not bf16]


@pytest.mark.parametrize(("low", "high", "bf16"), FIELDS)
def test_fields(low: int, high: int, bf16: bool) -> None:
    dtype = FLOATS[bf16]
    for plane in range(16 // low):
        offset = bits.offset_of(plane, low, high, dtype)
        shift, mask = bits.shift_of(plane, low, high, dtype), ((1 << low) - 1) << offset
        number = bits.magic(dtype)
        assert offset + low + high <= bits.mantissa(dtype)
        assert (shift + offset) == plane * low
        lows, highs = (
            plain(plain_field, words, SHIFT=shift, MASK=mask, BITS=number) for words in (ALL, OTHER)
        )
        [found] = run(bits.field_asm(shift, mask, number), [in_pairs(ALL, OTHER)], 1)
        check(found, lows, highs)
        assert ((lows ^ number) >> offset == (ALL >> (plane * low)) & ((1 << low) - 1)).all()


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(("low", "high"), [s for s in SPLITS if s[1]])
def test_merges(low: int, high: int, bf16: bool) -> None:
    dtype = FLOATS[bf16]
    for plane in range(16 // high):
        offset = bits.offset_of(plane % (16 // low), low, high, dtype) + low
        shift, mask = plane * high - offset, ((1 << high) - 1) << offset
        base = np.full_like(ALL, bits.magic(dtype))
        lows, highs = (
            plain(plain_merge, words, base, SHIFT=shift, MASK=mask) for words in (ALL, OTHER)
        )
        inputs = [in_pairs(ALL, OTHER), in_pairs(base, base)]
        [found] = run(bits.merge_asm(shift, mask), inputs, 1)
        check(found, lows, highs)
        field = (ALL >> (plane * high)) & ((1 << high) - 1)
        assert ((lows ^ base) >> offset == field).all()


@pytest.mark.parametrize("place", [0, 1])
def test_bytes(place: int) -> None:
    lows, highs = (plain(plain_byte, words, P=place) for words in (ALL, OTHER))
    [found] = run(bytes.byte_asm(place), [in_pairs(ALL, OTHER)], 1)
    check(found, lows, highs)
    values = torch.from_numpy(lows.view(np.int16)).view(torch.bfloat16)
    assert (values.float().numpy() == (ALL >> (8 * place) & 255).astype(np.float32) - 128).all()


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("width", [4, 8])
def test_narrow_floats(width: int, bf16: bool) -> None:
    dtype = torch.bfloat16 if bf16 else torch.float16
    exponent = {(8, False): 8, (8, True): 120, (4, False): 14, (4, True): 126}[width, bf16]
    for plane in range(16 // width):
        lows, highs = (
            plain(plain_float, words, P=plane, BITS=width, BF16=bf16) for words in (ALL, OTHER)
        )
        [found] = run(bytes.float_asm(plane, width, bf16), [in_pairs(ALL, OTHER)], 1)
        check(found, lows, highs)
        codes = (ALL >> (width * plane)) & ((1 << width) - 1)
        values = torch.from_numpy(lows.view(np.int16)).view(dtype).double() * 2.0**exponent
        if width == 4:
            exact = torch.tensor(E2M1_TWICE).double()[torch.from_numpy(codes.astype(np.int64))] / 2
        else:
            data = torch.from_numpy(codes.astype(np.uint8)).view(torch.float8_e4m3fn)
            exact = data.double()
        number = ~exact.isnan()
        assert torch.equal(values[number], exact[number])


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("table", TABLES, ids=["iq4", "lowest", "e2m1"])
def test_tables(table: tuple[int, ...], bf16: bool) -> None:
    lows, highs = (plain(plain_table, w, wide=True, TABLE=table, BF16=bf16) for w in (ALL, OTHER))
    text = bytes.table_asm(bytes.table_bytes(table, bf16))
    first, second = run(text, [in_pairs(ALL, OTHER)], 2)
    assert (first == lows).all()
    assert (second == highs).all()
    for plane in range(4):
        small, large = (plain(plain_table_byte, v, P=plane, BF16=bf16) for v in (first, second))
        [found] = run(bytes.table_byte_asm(plane, bf16), [first, second], 1)
        check(found, small, large)
        values = np.array(table)[(ALL >> (4 * plane)) & 15]
        if bf16:
            number = plain(plain_signed, small)
            numbers = torch.from_numpy(number.view(np.int16)).view(torch.bfloat16).float().numpy()
        else:
            numbers = torch.from_numpy(small.view(np.int16)).view(torch.float16).float().numpy()
            numbers -= 1024 + 128
        assert (numbers == values).all()


def test_signs_and_sizes() -> None:
    """The two lines of PTX behind ``signed``, over every size and sign."""
    for mask in (0x807F, 0x8000):
        lows, highs = (plain(plain_field, w, SHIFT=0, MASK=mask, BITS=0x4300) for w in (ALL, OTHER))
        [found] = run(bits.field_asm(0, mask, 0x4300), [in_pairs(ALL, OTHER)], 1)
        check(found, lows, highs)
