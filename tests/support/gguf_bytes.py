"""Builds GGUF files byte by byte, valid or damaged on purpose."""

from __future__ import annotations

import struct
from collections.abc import Sequence

U32, I32, BOOL, STRING, ARRAY, U64 = 4, 5, 7, 8, 9, 10
Tensor = tuple[str | bytes, tuple[int, ...], int, int]


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key(name: str | bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def u32(name: str, value: int) -> bytes:
    return key(name, U32, struct.pack("<I", value))


def tensor(name: str | bytes, dims: Sequence[int], kind: int, offset: int) -> bytes:
    head = text(name) + struct.pack("<I", len(dims))
    return head + struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", kind, offset)


def gguf(
    keys: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    alignment: int = 32,
    key_count: int | None = None,
    tensor_count: int | None = None,
) -> bytes:
    counts = (
        len(tensors) if tensor_count is None else tensor_count,
        len(keys) if key_count is None else key_count,
    )
    head = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join([*keys, *tensors])
    padding = -len(head) % alignment if data else 0
    return head + bytes(padding) + data


def nested(depth: int) -> bytes:
    """An array of one array of one array ..., ``depth`` deep, around one u32."""
    return struct.pack("<IQ", ARRAY, 1) * (depth - 1) + struct.pack("<IQI", U32, 1, 7)
