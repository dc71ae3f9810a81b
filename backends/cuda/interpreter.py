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


def enable_bfloat16() -> None:
    """Change the interpreter of this process. Idempotent; ``triton`` is imported here."""
    if _done:
        return
    import triton.language as tl
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    handle: Any = interpreter.TensorHandle
    numpy_type: Any = interpreter._get_np_dtype  # type: ignore[attr-defined,unused-ignore]

    def is_narrow(value: Any) -> bool:
        return bool(value.dtype.scalar == tl.bfloat16)

    def floats(value: Any) -> Array:
        data: Array = value.data
        return widened(data) if is_narrow(value) else data

    def result(values: Array) -> Any:
        if values.dtype == np.bool_:
            return handle(values, tl.int1)
        return handle(rounded(values), tl.bfloat16)

    def around(name: str, replacement: Callable[..., Any]) -> None:
        plain = getattr(builder, name)
        setattr(builder, name, lambda self, *given: replacement(plain, self, *given))

    def elementwise(plain: Any, self: Any, *given: Any) -> Any:
        *values, operation = given
        # A selection only moves bits, and its first operand is no number.
        if operation is np.where or not is_narrow(values[-1]):
            return plain(self, *given)
        return result(operation(*map(floats, values)))

    def cast(plain: Any, self: Any, source: Any, dest: Any) -> Any:
        narrow = dest.scalar == tl.bfloat16
        if is_narrow(source) == narrow:
            return plain(self, source, dest)
        if narrow:
            return handle(rounded(source.data.astype(np.float32)), dest.scalar)
        return handle(widened(source.data).astype(numpy_type(dest)), dest.scalar)

    def cast_floats(plain: Any, self: Any, source: Any, dest: Any, mode: Any) -> Any:
        if is_narrow(source) != (dest.scalar == tl.bfloat16):
            return self.cast_impl(source, dest)
        return plain(self, source, dest, mode)

    def dot(plain: Any, self: Any, left: Any, right: Any, *rest: Any) -> Any:
        wide = [handle(floats(v), tl.float32) if is_narrow(v) else v for v in (left, right)]
        return plain(self, *wide, *rest)

    def fma(plain: Any, self: Any, left: Any, right: Any, added: Any) -> Any:
        if not is_narrow(added):
            return plain(self, left, right, added)
        wide = [floats(value).astype(np.float64) for value in (left, right, added)]
        return result((wide[0] * wide[1] + wide[2]).astype(np.float32))

    for name in ("unary_op", "binary_op", "ternary_op"):
        around(name, elementwise)
    around("cast_impl", cast)
    around("create_fp_to_fp", cast_floats)
    around("create_dot", dot)
    around("create_fma", fma)
    _done.append("bfloat16")
