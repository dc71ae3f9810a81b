"""Tensors in the files of a checkpoint folder.

Comes in: the path of a file. Goes out: its tensors by name, with dtype and shape, unread.
Always holds: no code of a file is executed: safetensors hold none, and a pickle is opened with
``weights_only`` or not at all.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qcompile.errors import SchemeError
from qcompile.layout import Shape

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
READABLE = frozenset(_DTYPES.values())


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that is still in its file.

    Attributes:
        name: its name in the file.
        dtype: its dtype.
        shape: its shape.
        file: the file.
        read: the entries ``start..stop`` along an axis; None for all of it.
        release: drops what reading brought into memory, where that is possible.
    """

    name: str
    dtype: torch.dtype
    shape: Shape
    file: Path
    read: Callable[[tuple[int, int, int] | None], torch.Tensor]
    release: Callable[[], None]

    @property
    def source(self) -> str:
        """File and name, for messages."""
        return f"{self.file}: {self.name}"

    def load(self) -> torch.Tensor:
        """The whole tensor."""
        return self.read(None)

    def part(self, axis: int, start: int, stop: int) -> torch.Tensor:
        """The entries ``start..stop`` along ``axis``."""
        return self.read((axis, start, stop))


def open_file(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file, a safetensors file by its suffix, else a pickle of tensors.

    Raises:
        SchemeError: there is no such file, it is damaged, or it is a pickle of more than tensors.
    """
    if not path.is_file():
        raise SchemeError(str(path), "no such file", "a file of tensors", "download it again")
    return _open_safetensors(path) if path.suffix == ".safetensors" else _open_pickle(path)


class _Mapped:
    """A safetensors file that is mapped when needed and can be let go."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: Any = None
        self._first = self._state()

    def handle(self) -> Any:
        # Offsets would be those of another file; a mapping shows that one's bytes too.
        if self._state() != self._first:
            raise SchemeError(
                str(self.path),
                "changed or removed since it was opened",
                "the same file until the weights are packed, on the first call",
                "open the checkpoint again",
            )
        if self._handle is None:
            from safetensors import safe_open  # not before a folder is opened

            self._handle = safe_open(str(self.path), "pt")
        return self._handle

    def _state(self) -> tuple[int, ...] | None:
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns

    def release(self) -> None:
        self._handle = None  # unmaps, and with it goes what was read from memory

    def read(self, name: str, part: tuple[int, int, int] | None) -> torch.Tensor:
        if part is None:
            found: torch.Tensor = self.handle().get_tensor(name)
            return found
        axis, start, stop = part
        stored = self.handle().get_slice(name)
        found = stored[(slice(None),) * axis + (slice(start, stop),)]
        return found


def _open_safetensors(path: Path) -> dict[str, StoredTensor]:
    from safetensors import SafetensorError

    mapped = _Mapped(path)
    try:
        handle = mapped.handle()
        names = list(handle.keys())
    except (SafetensorError, OSError, ValueError) as error:
        raise SchemeError(
            str(path),
            f"not a safetensors file: {_looks_like(path) or error}",
            "a complete safetensors file",
            "download it again",
        ) from None
    found: dict[str, StoredTensor] = {}
    for name in names:
        stored = handle.get_slice(name)
        kind, shape = stored.get_dtype(), tuple(stored.get_shape())
        if kind not in _DTYPES:
            raise SchemeError(
                f"{path}: {name}",
                f"dtype {kind}",
                f"one of {', '.join(_DTYPES)}",
                "convert the tensor to one of these",
            )
        found[name] = StoredTensor(
            name, _DTYPES[kind], shape, path, _reader(mapped, name), mapped.release
        )
    mapped.release()
    return found


def _reader(mapped: _Mapped, name: str) -> Callable[[tuple[int, int, int] | None], torch.Tensor]:
    return lambda part: mapped.read(name, part)


def _looks_like(path: Path) -> str:
    """What a file is that is no safetensors file, where its first bytes tell."""
    with path.open("rb") as file:
        head = file.read(64)
    if not head:
        return "the file is empty"
    if head.startswith(b"version https://git-lfs"):
        return "it is a git-lfs pointer, the file itself was not fetched"
    if head.lstrip().lower().startswith((b"<!doctype", b"<html")):
        return "it is a web page"
    if head.startswith((b"PK\x03\x04", b"\x80")):
        return "it is a pickle of torch.save"
    if head.startswith(b"GGUF"):
        return "it is a GGUF file"
    return ""


def _open_pickle(path: Path) -> dict[str, StoredTensor]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, OSError, ValueError, EOFError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise SchemeError(
            str(path),
            f"not a pickle of tensors alone: {_pointer(path) or first}",
            "a file that torch.load(weights_only=True) opens; nothing else of a pickle is run",
            "convert it to safetensors on a machine where you trust it",
        ) from None
    if not isinstance(content, dict):
        raise SchemeError(
            str(path), f"a {type(content).__name__}", "a dict of tensors", "save the state dict"
        )
    found: dict[str, StoredTensor] = {}
    for name, tensor in content.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise SchemeError(
                f"{path}: {name}",
                f"a {type(tensor).__name__}",
                "a tensor",
                "save the state dict of the model alone",
            )
        found[name] = in_memory(name, tensor.detach(), path)
    return found


def _pointer(path: Path) -> str:
    kind = _looks_like(path)
    return "" if "pickle" in kind else kind


def in_memory(name: str, tensor: torch.Tensor, path: Path) -> StoredTensor:
    """A tensor that is not in a file; ``path`` names its place."""

    def read(part: tuple[int, int, int] | None) -> torch.Tensor:
        return tensor if part is None else tensor.narrow(part[0], part[1], part[2] - part[1])

    return StoredTensor(name, tensor.dtype, tuple(tensor.shape), path, read, lambda: None)
