"""Eight int4 in an int32, from codes and from the words of other packings."""

from __future__ import annotations

import pytest
import torch
from support.pack_awq import interleave

from qcompile.backends.npu import nibbles
from qcompile.schemes.words import pack_words


def documented(values: torch.Tensor) -> torch.Tensor:
    """The packing as the operator's page words it, value by value."""
    rows, columns = values.shape
    words = torch.zeros(rows, columns // 8, dtype=torch.int64)
    for row in range(rows):
        for column in range(columns):
            field = (int(values[row, column]) & 15) << (4 * (column % 8))
            words[row, column // 8] |= field
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def codes(rows: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randint(0, 16, (rows, columns), generator=generator).to(torch.uint8)


@pytest.mark.parametrize(("rows", "columns"), [(1, 8), (3, 16), (16, 40)])
def test_packing_is_the_documented_one(rows: int, columns: int) -> None:
    values = codes(rows, columns).to(torch.int8) - 8
    words = nibbles.pack(values)
    assert torch.equal(words, documented(values))
    assert torch.equal(nibbles.unpack(words), values)
    assert torch.equal(nibbles.pack(values.t().contiguous().t()), words)


@pytest.mark.parametrize(("rows", "columns"), [(8, 8), (16, 24), (64, 40)])
def test_words_are_turned_without_unpacking(rows: int, columns: int) -> None:
    unsigned = codes(rows, columns)
    by_rows = pack_words(unsigned, 4, 0)
    assert torch.equal(nibbles.turn(by_rows), pack_words(unsigned, 4, 1))


def test_gptq_words_need_a_transpose_and_a_sign() -> None:
    unsigned = codes(16, 64)
    qweight = pack_words(unsigned.t().contiguous(), 4, 0)  # [K / 8, N]
    packed = documented(unsigned.to(torch.int8) - 8)
    assert torch.equal(nibbles.signed(qweight.t().contiguous()), packed)


def test_awq_words_need_their_order_and_a_sign() -> None:
    unsigned = codes(32, 24)
    packed = documented(unsigned.to(torch.int8) - 8)
    words = interleave(unsigned.long().numpy())
    assert torch.equal(nibbles.signed(nibbles.from_awq(words)), packed)
