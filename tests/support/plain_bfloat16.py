# mypy: ignore-errors
"""Kernels that compute on numbers of 16 bits, to be compared with torch."""

from __future__ import annotations

import triton  # noqa: TID251 - the interpreter is what is tested
import triton.language as tl  # noqa: TID251


@triton.jit
def elementwise(a, b, wide, ints, out, COUNT: tl.constexpr):
    """Seven results a pair: product, sum, difference, negation, two casts, a selection."""
    i = tl.arange(0, COUNT)
    x, y, w, n = tl.load(a + i), tl.load(b + i), tl.load(wide + i), tl.load(ints + i)
    tl.store(out + i, x * y)
    tl.store(out + COUNT + i, x + y)
    tl.store(out + 2 * COUNT + i, x - y * 0.5)
    tl.store(out + 3 * COUNT + i, -x)
    tl.store(out + 4 * COUNT + i, w.to(out.dtype.element_ty))
    tl.store(out + 5 * COUNT + i, n.to(out.dtype.element_ty))
    tl.store(out + 6 * COUNT + i, tl.where(x > y, x, y))


@triton.jit
def product(a, b, out, SIZE: tl.constexpr):
    """A square matrix product with float32 sums."""
    i = tl.arange(0, SIZE)
    at = i[:, None] * SIZE + i[None, :]
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at)))
