"""A pretended Ascend device behind the real torch_npu: its operators are Python functions.

Comes in: handlers by operator. Goes out: the package runs its own C++ host code, and every call
that would reach the device reaches a handler, with exact dtypes, shapes, strides and memory.
Always holds: a handler that raises makes the operator fail; ``LOG`` tells what happened.

The process must be started with the stub libraries on ``LD_LIBRARY_PATH``, ``QC_FAKE_NPU=1`` and
``TASK_QUEUE_ENABLE=0`` (with a queue, an operator's error shows up later and elsewhere).
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

Handler = Callable[..., Any]
_REFUSED, _UNKNOWN = 161002, 561103  # the vendor's numbers for bad arguments and missing operators
_DTYPES = {
    0: torch.float32,
    1: torch.float16,
    2: torch.int8,
    3: torch.int32,
    4: torch.uint8,
    6: torch.int16,
    9: torch.int64,
    11: torch.float64,
    12: torch.bool,
    27: torch.bfloat16,
}


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("dims", ctypes.c_int64),
        ("size", ctypes.c_int64 * 8),
        ("stride", ctypes.c_int64 * 8),
        ("offset", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
        ("format", ctypes.c_int64),
        ("storage_dims", ctypes.c_int64),
        ("storage", ctypes.c_int64 * 8),
        ("data", ctypes.c_void_p),
    )


class _TensorList(ctypes.Structure):
    _fields_ = (("count", ctypes.c_int64), ("items", ctypes.POINTER(ctypes.POINTER(_Tensor))))


class _Scalar(ctypes.Structure):
    _fields_ = (("dtype", ctypes.c_int64), ("real", ctypes.c_double), ("whole", ctypes.c_int64))


class _Array(ctypes.Structure):
    _fields_ = (("count", ctypes.c_int64), ("items", ctypes.POINTER(ctypes.c_int64)))


class _Argument(ctypes.Union):
    _fields_ = (
        ("pointer", ctypes.c_void_p),
        ("whole", ctypes.c_int64),
        ("real", ctypes.c_double),
    )


@dataclass
class Log:
    """What happened on the device.

    Attributes:
        calls: names of the operators that ran, in order.
        error: what the last handler that failed raised.
    """

    calls: list[str] = field(default_factory=list)
    error: Exception | None = None


LOG = Log()
_kept: list[Any] = []  # callbacks must outlive the libraries' use of them


def _view(raw: Any) -> torch.Tensor:
    """A CPU tensor over the memory of a device tensor."""
    dtype = _DTYPES[raw.dtype]
    size, stride = tuple(raw.size[: raw.dims]), tuple(raw.stride[: raw.dims])
    if not all(size) or not raw.data:
        return torch.empty(size, dtype=dtype)
    last = raw.offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    room = (ctypes.c_char * ((last + 1) * dtype.itemsize)).from_address(raw.data)
    flat = torch.frombuffer(room, dtype=torch.uint8).view(dtype)
    return flat.as_strided(size, stride, raw.offset)


def _decode(kind: str, raw: Any) -> Any:
    if kind in "TLSA" and not raw.pointer:
        return None
    if kind == "T":
        return _view(_Tensor.from_address(raw.pointer))
    if kind == "L":
        found = _TensorList.from_address(raw.pointer)
        return [_view(found.items[i].contents) for i in range(found.count)]
    if kind == "S":
        scalar = _Scalar.from_address(raw.pointer)
        return scalar.real if scalar.dtype in (0, 11) else scalar.whole
    if kind == "A":
        array = _Array.from_address(raw.pointer)
        return [array.items[i] for i in range(array.count)]
    if kind == "s":
        return ctypes.string_at(raw.pointer).decode()
    return raw.whole if kind == "i" else raw.real


def install(handlers: Mapping[str, Handler]) -> None:
    """Let the operators of the pretended device run handlers."""
    operators = ctypes.CDLL("libopapi.so")
    runtime = ctypes.CDLL("libqcstub_all.so")
    capturing = ctypes.c_int.in_dll(runtime, "qc_capturing")
    captured: dict[int, list[tuple[Handler, list[Any]]]] = {}

    def replay(graph: int) -> None:
        for handler, given in captured.get(graph, []):
            handler(*given)

    def handle(name: bytes, kinds: bytes, row: Any, count: int) -> int:
        handler = handlers.get(name.decode())
        if handler is None:
            print(f"no handler for {name.decode()}", file=sys.stderr)
            return _UNKNOWN
        try:
            given = [_decode(kind, row[i]) for i, kind in enumerate(kinds.decode())]
            LOG.calls.append(name.decode())
            if capturing.value:
                captured.setdefault(capturing.value, []).append((handler, given))
            else:
                handler(*given)
        except Exception as error:
            LOG.error = error
            return _REFUSED
        return 0

    pointer = ctypes.POINTER(_Argument)
    handle_type = ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p, pointer, ctypes.c_int
    )
    replay_type = ctypes.CFUNCTYPE(None, ctypes.c_int)
    _kept.extend((handle_type(handle), replay_type(replay)))
    operators.qc_set_handler(_kept[-2])
    ctypes.c_void_p.in_dll(runtime, "qc_replay").value = ctypes.cast(
        _kept[-1], ctypes.c_void_p
    ).value
