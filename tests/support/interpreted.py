"""What an interpreted kernel must not do is an error here.

Triton's interpreter checks nothing: a load or store anywhere in memory succeeds. Here every one of
them has to stay inside the tensors of its launch, and everything that a launch allocates starts as
NaN, so that what a kernel leaves out shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import triton  # noqa: TID251 - the vendor's interpreter is what these tests run in
from triton.runtime import interpreter  # noqa: TID251
from triton.runtime.errors import InterpreterError  # noqa: TID251

from qcompile.backends.cuda.interpreter import enable_bfloat16

__all__ = ["InterpreterError", "OutOfBounds", "is_interpreted", "strict", "surrounded"]
_ranges: list[tuple[int, int]] = []


class OutOfBounds(Exception):
    """An access outside the tensors of a launch."""


def _remember(*args: Any, **kwargs: Any) -> None:
    _ranges.clear()
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.numel():
            last = sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
            start = value.data_ptr()
            _ranges.append((start, start + (last + 1) * value.element_size()))


def _check(pointers: Any, mask: Any, what: str) -> None:
    at = np.broadcast_to(pointers.data, np.broadcast(pointers.data, mask.data).shape)
    at = at[np.broadcast_to(mask.data, at.shape)]
    width = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
    inside = np.zeros(at.shape, dtype=bool)
    for start, stop in _ranges:
        inside |= (at >= start) & (at + width <= stop)
    if not inside.all():
        raise OutOfBounds(f"{(~inside).sum()} of {inside.size} addresses of a {what}")


@contextmanager
def strict(*kernels: Any) -> Iterator[None]:
    """Check every access of these kernels, and poison what their launches allocate."""
    enable_bfloat16()
    builder: Any = interpreter.InterpreterBuilder
    load, store, empty = (
        builder.create_masked_load,
        builder.create_masked_store,
        torch.Tensor.new_empty,
    )

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        _check(pointers, mask, "load")
        return load(self, pointers, mask, *rest, **named)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, policy: Any) -> Any:
        _check(pointers, mask, "store")
        return store(self, pointers, value, mask, policy)

    def poisoned(self: torch.Tensor, *size: Any, **named: Any) -> torch.Tensor:
        made = empty(self, *size, **named)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    builder.create_masked_load, builder.create_masked_store = checked_load, checked_store
    torch.Tensor.new_empty = poisoned  # type: ignore[method-assign,assignment]
    for kernel in kernels:
        kernel.add_pre_run_hook(_remember)
    try:
        yield
    finally:
        builder.create_masked_load, builder.create_masked_store = load, store
        torch.Tensor.new_empty = empty  # type: ignore[method-assign]
        for kernel in kernels:
            kernel.pre_run_hooks.remove(_remember)


def surrounded(x: torch.Tensor) -> torch.Tensor:
    """The same matrix as a part of a larger one that is NaN elsewhere."""
    room = torch.full((x.shape[0] + 2, x.shape[1] + 24), float("nan"), dtype=x.dtype)
    room[1:-1, 16:-8] = x
    return room[1:-1, 16:-8]


def is_interpreted(kernel: Any) -> bool:
    """Whether a kernel was decorated in a process that interprets."""
    return not isinstance(kernel, triton.runtime.jit.JITFunction)
