"""Triton's interpreter with bfloat16 that counts.

Comes in: nothing. Goes out: an interpreter whose bfloat16 values are values.
Always holds: results are those of float32 arithmetic rounded to the nearest even bfloat16, which is
what a device computes; nothing else of the interpreter changes.

The interpreter keeps bfloat16 as integers of 16 bits and lets numpy compute on the bits (seen in
3.6 and 3.9; its authors do not support it), so products are noise. ``widened`` and ``rounded`` go
between the bits and float32 around the operations that kernels here use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
_done: list[str] = []


def widened(bits: Array) -> Array:
    """float32 values of bfloat16 bits."""
    values: Array = (bits.astype(np.uint32) << 16).view(np.float32)
    return values


def rounded(values: Array) -> Array:
    """bfloat16 bits nearest to float32 values, ties to even.

    >>> [hex(b) for b in rounded(np.array([1.0, 1.00390625, 1.01171875, np.inf], np.float32))]
    ['0x3f80', '0x3f80', '0x3f82', '0x7f80']
    """
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    tie = (bits >> 16) & 1
    nearest = ((bits + np.uint32(0x7FFF) + tie) >> 16).astype(np.uint16)
    result: Array = np.where(np.isnan(values), np.uint16(0x7FC0), nearest)
    return result


@dataclass(frozen=True)
class _Values:
    """The interpreter's operations around ``plain``, its own, on bfloat16 as values.

    Attributes:
        narrow, wide, truth: Triton's bfloat16, float32 and int1.
        handle: what the interpreter keeps an array and its type in.
        numpy_type: numpy's type for one of Triton's.
    """

    narrow: Any
    wide: Any
    truth: Any
    handle: Any
    numpy_type: Any

    def is_narrow(self, value: Any) -> bool:
        return bool(value.dtype.scalar == self.narrow)

    def floats(self, value: Any) -> Array:
        data: Array = value.data
        return widened(data) if self.is_narrow(value) else data

    def result(self, values: Array) -> Any:
        if values.dtype == np.bool_:
            return self.handle(values, self.truth)
        return self.handle(rounded(values), self.narrow)

    def elementwise(self, plain: Any, builder: Any, *given: Any) -> Any:
        *values, operation = given
        # A selection only moves bits, and its first operand is no number.
        if operation is np.where or not self.is_narrow(values[-1]):
            return plain(builder, *given)
        return self.result(operation(*map(self.floats, values)))

    def cast(self, plain: Any, builder: Any, source: Any, dest: Any) -> Any:
        narrow = dest.scalar == self.narrow
        if self.is_narrow(source) == narrow:
            return plain(builder, source, dest)
        if narrow:
            return self.handle(rounded(source.data.astype(np.float32)), dest.scalar)
        return self.handle(widened(source.data).astype(self.numpy_type(dest)), dest.scalar)

    def cast_floats(self, plain: Any, builder: Any, source: Any, dest: Any, mode: Any) -> Any:
        if self.is_narrow(source) != (dest.scalar == self.narrow):
            return builder.cast_impl(source, dest)
        return plain(builder, source, dest, mode)

    def dot(self, plain: Any, builder: Any, left: Any, right: Any, *rest: Any) -> Any:
        wide = [
            self.handle(self.floats(v), self.wide) if self.is_narrow(v) else v
            for v in (left, right)
        ]
        return plain(builder, *wide, *rest)

    def fma(self, plain: Any, builder: Any, left: Any, right: Any, added: Any) -> Any:
        if not self.is_narrow(added):
            return plain(builder, left, right, added)
        wide = [self.floats(value).astype(np.float64) for value in (left, right, added)]
        return self.result((wide[0] * wide[1] + wide[2]).astype(np.float32))


def enable_bfloat16() -> None:
    """Change the interpreter of this process. Idempotent; ``triton`` is imported here."""
    if _done:
        return
    import triton.language as tl
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    numpy_type: Any = interpreter._get_np_dtype  # type: ignore[attr-defined,unused-ignore]
    values = _Values(tl.bfloat16, tl.float32, tl.int1, interpreter.TensorHandle, numpy_type)

    def around(name: str, replacement: Callable[..., Any]) -> None:
        plain = getattr(builder, name)
        setattr(builder, name, lambda self, *given: replacement(plain, self, *given))

    for name in ("unary_op", "binary_op", "ternary_op"):
        around(name, values.elementwise)
    around("cast_impl", values.cast)
    around("create_fp_to_fp", values.cast_floats)
    around("create_dot", values.dot)
    around("create_fma", values.fma)
    _done.append("bfloat16")
