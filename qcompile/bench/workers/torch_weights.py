"""Weights and activations for the peers that are torch packages.

Comes in: a shape and what a weight means. Goes out: random codes and scales with their values, and
copies of a peer's own parts in turns.
Always holds: numbers depend on the shape alone; values are about 0.02 large; the error of a product
is measured on its first columns, against the values that the peer's own parts stand for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .rounds import Built, copies_for

Product = Callable[[torch.Tensor, Any], torch.Tensor]
CHECKED = 256  # rows of a weight whose products are checked


def floats(n: int, k: int) -> torch.Tensor:
    """Float32 ``[n, k]``, normal with a deviation of 0.02."""
    draw = torch.Generator().manual_seed(n + k)
    return torch.empty(n, k).normal_(std=0.02, generator=draw)


def affine(bits: int, group: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 ``[n, k]`` around ``2**(bits - 1)`` and scales float32 ``[n, k / group]``.

    The scales have bfloat16 values, so that peers which store those lose nothing.
    """
    draw = torch.Generator().manual_seed(n + k)
    codes = torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8, generator=draw)
    spread = 0.06 / (1 << bits)
    scale = torch.rand(n, k // group, generator=draw) * spread + spread / 2
    return codes, scale.bfloat16().float()


def values_of(codes: torch.Tensor, scale: torch.Tensor, bits: int) -> torch.Tensor:
    """What the first codes and scales mean, float32 ``[rows, k]``."""
    group = codes.shape[1] // scale.shape[1]
    codes, scale = codes[:CHECKED], scale[:CHECKED]
    return (codes.float() - (1 << (bits - 1))) * scale.repeat_interleave(group, 1)


class Activations:
    """Rows of one width and dtype, made once for each count."""

    def __init__(self, k: int, dtype: torch.dtype) -> None:
        self.k, self.dtype = k, dtype
        self.made: dict[int, torch.Tensor] = {}

    def __call__(self, rows: int) -> torch.Tensor:
        """Activations ``[rows, k]``."""
        if rows not in self.made:
            draw = torch.Generator().manual_seed(rows)
            self.made[rows] = torch.randn(rows, self.k, generator=draw).to(self.dtype)
        return self.made[rows]


def built(
    product: Product,
    parts: Any,
    values: torch.Tensor,
    dtype: torch.dtype,
    rotated: int,
    note: str,
) -> Built:
    """A weight's copies.

    Args:
        product: of activations and parts.
        parts: a tensor or a tuple of tensors, which are copied; what else is in a tuple is shared.
        values: float32 ``[rows, k]``, what the first rows of the parts mean.
        dtype: of activations.
        rotated: bytes that all copies together have to fill.
        note: for the table.
    """
    x, size = Activations(values.shape[1], dtype), nbytes(parts)
    given = x(8)
    wanted = given.float() @ values.T
    found = product(given, parts).float()[:, : len(values)]
    error = float((found - wanted).norm() / wanted.norm())
    copies = [parts, *(clone(parts) for _ in range(copies_for(size, rotated) - 1))]
    return Built(lambda copy, rows: product(x(rows), copies[copy]), len(copies), size, error, note)


def clone(parts: Any) -> Any:
    """A deep copy; tensor subclasses that do not copy themselves are taken apart."""
    if isinstance(parts, tuple):
        return tuple(clone(part) for part in parts)
    if not isinstance(parts, torch.Tensor):
        return parts
    if type(parts) in (torch.Tensor, torch.nn.Parameter):
        return parts.detach().clone()
    names, context = parts.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = {name: clone(getattr(parts, name)) for name in names}
    kind: Any = type(parts)
    return kind.__tensor_unflatten__(inner, context, parts.shape, parts.stride())


def nbytes(parts: Any) -> int:
    """Bytes of all tensors in parts."""
    if isinstance(parts, tuple):
        return sum(nbytes(part) for part in parts)
    if not isinstance(parts, torch.Tensor):
        return 0
    if type(parts) in (torch.Tensor, torch.nn.Parameter):
        return parts.nbytes
    names, _ = parts.__tensor_flatten__()  # type: ignore[attr-defined]
    return sum(nbytes(getattr(parts, name)) for name in names)
