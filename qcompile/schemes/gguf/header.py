"""Header of one GGUF file.

Comes in: the mapped bytes of a file. Goes out: its metadata and where each tensor lies.
Always holds: every number of the header was compared with the file's size before it was used; a
tensor lies inside the file, on the file's alignment, and shares no byte with another tensor.

Layout, little endian: ``GGUF``, u32 version (2 or 3), u64 tensor count, u64 key count; the keys
(string, u32 value type, value); the tensors (string name, u32 number of dimensions, u64 each
dimension with the columns first, u32 type, u64 offset); padding to ``general.alignment`` (32); the
tensors' bytes, to which the offsets are relative. Source: the GGUF specification in ggml's docs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from qcompile.layout import Shape
from qcompile.schemes.gguf.diagnose import LEADING_BYTES, describe
from qcompile.schemes.gguf.metadata import U32, Cursor, Metadata, Span
from qcompile.schemes.gguf.type_table import TYPES, type_name

MAX_KEY, MAX_NAME, MAX_ALIGNMENT = 65535, 4096, 1 << 20
_LEAST_KEY, _LEAST_TENSOR = 14, 33
_SIGNED_MAX = (1 << 63) - 1


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies and what its blocks are.

    Attributes:
        name: the file's name for it, for instance ``blk.0.attn_q.weight``.
        type_id: ggml's number of the block type.
        shape: rows first, ``(N, K)``, ``(E, N, K)`` or ``(N,)``.
        offset: byte of the file at which it starts.
        nbytes: its bytes, or None for a type of unknown size.
        file: path of the file (one of a split model's).
    """

    name: str
    type_id: int
    shape: Shape
    offset: int
    nbytes: int | None
    file: str

    @property
    def type_name(self) -> str:
        """Name of the block type, for instance ``q4_k``; ``type 77`` for an unknown one."""
        return type_name(self.type_id)


@dataclass(frozen=True)
class Header:
    """Metadata and tensors of one file."""

    version: int
    metadata: Metadata
    tensors: tuple[TensorInfo, ...]


def parse_header(cursor: Cursor) -> Header:
    """Read the header of a mapped file.

    Raises:
        SchemeError: the file is not GGUF, or its header is damaged; names the byte.
    """
    version = _version(cursor)
    tensor_count = cursor.u64(8, "the tensor count")
    key_count = cursor.u64(16, "the key count")
    for what, count, least, at in (
        ("keys", key_count, _LEAST_KEY, 16),
        ("tensors", tensor_count, _LEAST_TENSOR, 8),
    ):
        if count * least > cursor.size - 24:
            raise cursor.error(
                at, f"the header claims {count} {what}", f"{count * least} bytes or more for them"
            )
    metadata, at = _metadata(cursor, key_count)
    infos = []
    for _ in range(tensor_count):
        info, at = _tensor(cursor, at)
        infos.append(info)
    alignment = _alignment(cursor, metadata)
    start = -(-at // alignment) * alignment
    return Header(version, metadata, _place(cursor, infos, start, alignment))


def _version(cursor: Cursor) -> int:
    head = cursor.data[: min(LEADING_BYTES, cursor.size)]
    if head[:4] != b"GGUF":
        raise cursor.error(0, f"this is {describe(head)}", "a GGUF file, which starts with b'GGUF'")
    version = cursor.u32(4, "the version")
    swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
    if swapped in (1, 2, 3):
        raise cursor.error(
            4, f"this is a big-endian GGUF file of version {swapped}", "little endian"
        )
    if version not in (2, 3):
        raise cursor.error(4, f"GGUF version {version}", "version 2 or 3")
    return version


def _metadata(cursor: Cursor, count: int) -> tuple[Metadata, int]:
    spans: dict[str, Span] = {}
    at = 24
    for index in range(count):
        start = at
        key, at = cursor.name(at, f"the name of key {index}", MAX_KEY)
        if key in spans:
            raise cursor.error(start, f"key {key!r} appears twice", "each key once")
        kind = cursor.u32(at, f"the value type of {key!r}")
        end = cursor.skip(kind, at + 4, key)
        spans[key] = Span(kind, at + 4, end)
        at = end
    return Metadata(cursor, spans), at


def _alignment(cursor: Cursor, metadata: Metadata) -> int:
    key = "general.alignment"
    if key not in metadata:
        return 32
    value, kind = metadata[key], metadata.type_id(key)
    if kind == U32 and isinstance(value, int) and 0 < value <= MAX_ALIGNMENT:
        power_of_two = value & (value - 1) == 0
        if power_of_two:
            return value
    raise cursor.error(
        metadata.position(key),
        f"{key!r} is {value!r} of value type {kind}",
        f"a u32 (value type 4), a power of two, at most {MAX_ALIGNMENT}",
    )


def _tensor(cursor: Cursor, at: int) -> tuple[TensorInfo, int]:
    start = at
    name, at = cursor.name(at, "a tensor's name", MAX_NAME)
    ndim = cursor.u32(at, f"the dimensions of {name!r}")
    if not 1 <= ndim <= 4:
        raise cursor.error(at, f"tensor {name!r} has {ndim} dimensions", "1 to 4 dimensions")
    at += 4
    dims = [cursor.u64(at + 8 * axis, f"the dimensions of {name!r}") for axis in range(ndim)]
    if not all(0 < extent <= _SIGNED_MAX for extent in dims):
        raise cursor.error(at, f"tensor {name!r} has dimensions {dims}", "dimensions above zero")
    at += 8 * ndim
    type_id = cursor.u32(at, f"the type of {name!r}")
    offset = cursor.u64(at + 4, f"the offset of {name!r}")
    shape = tuple(reversed(dims))
    nbytes = _nbytes(cursor, name, type_id, shape, start)
    return TensorInfo(name, type_id, shape, offset, nbytes, cursor.path), at + 12


def _nbytes(cursor: Cursor, name: str, type_id: int, shape: Shape, at: int) -> int | None:
    count = 1
    for extent in shape:
        count *= extent
    if count > _SIGNED_MAX:
        raise cursor.error(
            at, f"tensor {name!r} of shape {shape} has {count} elements", "fewer than 2**63"
        )
    if type_id not in TYPES:
        return None
    kind = TYPES[type_id]
    if shape[-1] % kind.elements:
        raise cursor.error(
            at,
            f"tensor {name!r} of type {kind.name} has {shape[-1]} columns",
            f"a multiple of the block of {kind.elements}",
        )
    return count // kind.elements * kind.bytes


def _place(
    cursor: Cursor, infos: list[TensorInfo], start: int, alignment: int
) -> tuple[TensorInfo, ...]:
    """Make offsets absolute and check that the tensors fit the file and keep apart."""
    names: set[str] = set()
    placed = []
    for info in infos:
        if info.name in names:
            raise cursor.error(start, f"tensor {info.name!r} appears twice", "each name once")
        names.add(info.name)
        at, size = start + info.offset, info.nbytes or 0
        if info.offset % alignment:
            raise cursor.error(
                at,
                f"tensor {info.name!r} starts at offset {info.offset}",
                f"a multiple of the alignment {alignment}",
            )
        if at + size > cursor.size:
            raise cursor.error(
                at,
                f"tensor {info.name!r} needs {size} bytes, the file ends at byte {cursor.size}",
                "a complete file",
            )
        placed.append(replace(info, offset=at))
    for left, right in pairwise(sorted(placed, key=lambda info: info.offset)):
        if left.offset + (left.nbytes or 1) > right.offset:
            raise cursor.error(
                right.offset, f"tensors {left.name!r} and {right.name!r} share bytes", "none shared"
            )
    return tuple(placed)
