"""The interpreter computes on bfloat16 as torch does, to the bit, once it is told to."""

from __future__ import annotations

import pytest
import torch
from support.plain_bfloat16 import elementwise, product

from qcompile.backends.cuda.interpreter import enable_bfloat16
from qcompile.backends.cuda.layouts import DTYPES

COUNT, SIZE = 4096, 32


def numbers(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Of all sizes, with zeros, infinities and what is no number."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.randint(-9, 9, (2, COUNT), generator=generator).float().exp2()
    found = torch.randn(2, COUNT, generator=generator) * scale
    found[0, :8] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1.0, 0.0, 2.0**-130])
    return found[0].to(dtype), found[1].to(dtype)


def test_elementwise() -> None:
    enable_bfloat16()
    dtype = torch.bfloat16
    a, b = numbers(dtype)
    wide = torch.randn(COUNT, generator=torch.Generator().manual_seed(1)) * 100
    # Halfway between two values of seven bits: to the even one, down and up.
    wide[:4] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8), torch.nan])
    ints = torch.randint(-(1 << 10), 1 << 10, (COUNT,), dtype=torch.int32)
    out = torch.empty(7, COUNT, dtype=dtype)
    elementwise[(1,)](a, b, wide, ints, out, COUNT=COUNT)
    half = (b.float() * 0.5).to(dtype)
    expected = (
        a * b,
        a + b,
        a - half,
        -a,
        wide.to(dtype),
        ints.to(dtype),
        torch.where(a > b, a, b),
    )
    for found, wanted in zip(out, expected, strict=True):
        assert torch.equal(found.isnan(), wanted.isnan())
        real = ~wanted.isnan()
        assert torch.equal(found[real].view(torch.int16), wanted[real].view(torch.int16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products(dtype: torch.dtype) -> None:
    enable_bfloat16()
    a, b = (torch.randn(SIZE, SIZE).to(dtype) for _ in range(2))
    out = torch.empty(SIZE, SIZE)
    product[(1,)](a, b, out, SIZE=SIZE)
    torch.testing.assert_close(out, a.float() @ b.float(), rtol=1e-5, atol=1e-5)
