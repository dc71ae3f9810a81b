"""Key-value metadata of a GGUF file, decoded when asked.

Comes in: the mapped file and the position of a value. Goes out: Python scalars, strings and lists.
Always holds: opening a file walks over arrays without decoding them (a vocabulary has hundreds of
thousands of strings); no count or length from the file is trusted before it is compared with the
bytes that are left.

Value types (id: meaning), little endian: 0 u8, 1 i8, 2 u16, 3 i16, 4 u32, 5 i32, 6 f32, 7 bool (one
byte, 0 or 1), 8 string (u64 length, bytes), 9 array (u32 element type, u64 count, elements), 10
u64, 11 i64, 12 f64. Source: the GGUF specification in ggml's docs.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from qcompile.errors import SchemeError

Value = int | float | bool | str | list["Value"]

U32, BOOL, STRING, ARRAY = 4, 7, 8, 9
SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"
}  # fmt: skip
MAX_DEPTH = 8
_U64 = struct.Struct("<Q")
_ARRAY_HEAD = struct.Struct("<IQ")


@dataclass(frozen=True)
class Span:
    """A value that was walked over: its type id and where it starts and ends."""

    type_id: int
    start: int
    end: int


@dataclass(frozen=True)
class Cursor:
    """The mapped bytes of one file, with reads that fail as SchemeError.

    Attributes:
        path: the file, for messages.
        data: the mapping.
        size: bytes in the file.
    """

    path: str
    data: mmap.mmap
    size: int

    def error(self, at: int, found: str, needed: str) -> SchemeError:
        """A SchemeError that points at a byte of this file."""
        return SchemeError(
            f"{self.path}, byte {at}",
            found,
            needed,
            "fetch or convert the file again; it is damaged or not GGUF",
        )

    def need(self, at: int, count: int, what: str) -> None:
        """Raise unless ``count`` bytes follow position ``at``."""
        if at + count > self.size:
            raise self.error(
                at,
                f"the file ends at byte {self.size}, inside {what}",
                f"{count} bytes here",
            )

    def u32(self, at: int, what: str) -> int:
        """An unsigned 32-bit number."""
        self.need(at, 4, what)
        return int.from_bytes(self.data[at : at + 4], "little")

    def u64(self, at: int, what: str) -> int:
        """An unsigned 64-bit number."""
        self.need(at, 8, what)
        return int.from_bytes(self.data[at : at + 8], "little")

    def name(self, at: int, what: str, limit: int) -> tuple[str, int]:
        """A key or a tensor name, and the position after it. Raises when it is not UTF-8."""
        length = self.u64(at, f"the length of {what}")
        if not 0 < length <= limit:
            raise self.error(at, f"{what} has {length} bytes", f"1 to {limit} bytes")
        self.need(at + 8, length, what)
        raw = self.data[at + 8 : at + 8 + length]
        try:
            return raw.decode("utf-8"), at + 8 + length
        except UnicodeDecodeError:
            raise self.error(at + 8, f"{what} is {raw[:80]!r}", "UTF-8 text") from None

    def skip(self, type_id: int, at: int, key: str) -> int:
        """The position after the value of type ``type_id`` that starts at ``at``.

        Arrays of arrays are walked with a list of what is still open, not by recursion, so that a
        file cannot choose how deep the interpreter's stack grows.
        """
        pending = [(type_id, 1, 1)]
        while pending:
            kind, count, depth = pending.pop()
            if kind != ARRAY:
                at = self._skip_run(kind, count, at, key)
                continue
            if depth > MAX_DEPTH:
                raise self.error(at, f"{key!r} nests arrays too deep", f"at most {MAX_DEPTH} deep")
            if count > 1:
                pending.append((kind, count - 1, depth))
            inner, length, at = self.array_head(at, key)
            if length:
                pending.append((inner, length, depth + 1))
        return at

    def array_head(self, at: int, key: str) -> tuple[int, int, int]:
        """Element type and count of the array at ``at``, and where its elements start."""
        self.need(at, _ARRAY_HEAD.size, f"the array {key!r}")
        inner, length = _ARRAY_HEAD.unpack_from(self.data, at)
        self._check_count(inner, length, at + _ARRAY_HEAD.size, key)
        return inner, length, at + _ARRAY_HEAD.size

    def _check_count(self, kind: int, count: int, at: int, key: str) -> None:
        least = _least_bytes(kind)
        if least is None:
            raise self.error(at - 12, f"{key!r} has value type {kind}", "a value type, 0 to 12")
        if count * least > self.size - at:
            raise self.error(
                at,
                f"{key!r} claims {count} elements of {least} bytes or more",
                f"at most the {self.size - at} bytes that are left",
            )

    def _skip_run(self, kind: int, count: int, at: int, key: str) -> int:
        if kind in SCALARS:
            length = struct.calcsize(SCALARS[kind]) * count
            self.need(at, length, f"the value of {key!r}")
            return at + length
        if kind != STRING:
            raise self.error(at, f"{key!r} has value type {kind}", "a value type, 0 to 12")
        end, unpack, data = at, _U64.unpack_from, self.data
        try:
            for _ in range(count):
                end += 8 + unpack(data, end)[0]
        except (struct.error, IndexError, OverflowError):
            end = self.size + 1
        if end > self.size:
            raise self.error(
                at, f"the file ends inside the text of {key!r}", "a complete string value"
            )
        return end


def _least_bytes(kind: int) -> int | None:
    if kind in SCALARS:
        return struct.calcsize(SCALARS[kind])
    return {STRING: 8, ARRAY: 12}.get(kind)


class Metadata(Mapping[str, Value]):
    """Keys of a file and their values; a value is decoded at its first use and kept.

    Text that is not UTF-8 (vocabularies hold pieces of characters) is decoded with backslash
    escapes, so that two different byte strings stay different.
    """

    def __init__(self, cursor: Cursor, spans: Mapping[str, Span]) -> None:
        self._cursor = cursor
        self._spans = spans
        self._values: dict[str, Value] = {}

    def __getitem__(self, key: str) -> Value:
        if key not in self._values:
            span = self._spans[key]
            self._values[key] = _decode(self._cursor, span.type_id, span.start, key)[0]
        return self._values[key]

    def __contains__(self, key: object) -> bool:
        return key in self._spans

    def __iter__(self) -> Iterator[str]:
        return iter(self._spans)

    def __len__(self) -> int:
        return len(self._spans)

    def forget(self) -> None:
        """Drop the decoded values and the file's pages they were read from.

        A vocabulary is tens of megabytes of small texts.
        """
        self._values.clear()
        data, end = self._cursor.data, max((span.end for span in self._spans.values()), default=0)
        if end and hasattr(data, "madvise"):
            data.madvise(mmap.MADV_DONTNEED, 0, end)

    def count(self, key: str) -> int | None:
        """Elements of the array under ``key`` without decoding it, None when it is no array."""
        span = self._spans[key]
        return self._cursor.array_head(span.start, key)[1] if span.type_id == ARRAY else None

    def type_id(self, key: str) -> int:
        """The value type that the file gives ``key``."""
        return self._spans[key].type_id

    def position(self, key: str) -> int:
        """The byte of the file at which the value of ``key`` starts."""
        return self._spans[key].start


def _decode(cursor: Cursor, kind: int, at: int, key: str) -> tuple[Value, int]:
    if kind == STRING:
        texts, at = _strings(cursor, 1, at)
        return texts[0], at
    if kind != ARRAY:
        values, at = _scalars(cursor, kind, 1, at, key)
        return values[0], at
    inner, length, at = cursor.array_head(at, key)
    if inner == STRING:
        texts, at = _strings(cursor, length, at)
        return list(texts), at
    if inner != ARRAY:
        return _scalars(cursor, inner, length, at, key)
    rows: list[Value] = []
    # The walk that opened the file bounded the depth.
    for _ in range(length):
        row, at = _decode(cursor, ARRAY, at, key)
        rows.append(row)
    return rows, at


def _strings(cursor: Cursor, count: int, at: int) -> tuple[list[str], int]:
    texts, unpack, data = [], _U64.unpack_from, cursor.data
    for _ in range(count):
        end = at + 8 + unpack(data, at)[0]
        texts.append(data[at + 8 : end].decode("utf-8", "backslashreplace"))
        at = end
    return texts, at


def _scalars(cursor: Cursor, kind: int, count: int, at: int, key: str) -> tuple[list[Value], int]:
    layout = struct.Struct(f"<{count}{SCALARS[kind]}")
    values: list[Value] = list(layout.unpack_from(cursor.data, at))
    if kind == BOOL:
        if any(value not in (0, 1) for value in values):
            raise cursor.error(at, f"{key!r} has a bool that is neither 0 nor 1", "0 or 1")
        values = [bool(value) for value in values]
    return values, at + layout.size
