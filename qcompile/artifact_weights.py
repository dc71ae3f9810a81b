"""The weights of an artifact: packed weights and all else that its graphs hold.

Comes in: constants of graphs, or a file. Goes out: the file, or tensors by number.
Always holds: what graphs share is stored once; a file that does not hold what was written is
refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from qcompile.errors import ArtifactError, LowerError, SchemeError
from qcompile.memory import Slabs, return_pages
from qcompile.schemes.folder.stored import READABLE, StoredTensor, open_file
from qcompile.writers.folder import umask

MARK = "artifact"
_MAPPED = 8 << 20  # bytes of the file that may be in memory twice


class Tensors:
    """Constants of several graphs, each once."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], int] = {}
        self._tensors: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        """Of them all."""
        return sum(tensor.nbytes for tensor in self._tensors)

    def number(self, tensor: torch.Tensor) -> int:
        """The number of a tensor; graphs that share one get the same.

        Raises:
            LowerError: files cannot hold it, or its rows do not lie one after the other.
        """
        if not tensor.is_contiguous() or tensor.dtype not in READABLE:
            raise LowerError(
                "a constant of the graph",
                f"{tensor.dtype} {list(tensor.shape)} with strides {tensor.stride()}",
                "a dtype of safetensors, rows that lie one after the other",
                "report this: such a tensor cannot be saved",
            )
        key = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape))
        if key not in self._kept:
            self._kept[key] = len(self._tensors)
            self._tensors.append(tensor)
        return self._kept[key]

    def write(self, path: Path, mark: str) -> None:
        """All of them in one file, by number; the mark is what ``read_weights`` asks for."""
        from safetensors.torch import save_file

        # Slabs hold several tensors in one piece of memory, each as a storage of its own. Of parts
        # of one storage, which the library refuses, all but whole ones are copied.
        owned: dict[str, torch.Tensor] = {}
        storages: set[int] = set()
        for number, tensor in enumerate(self._tensors):
            storage = tensor.untyped_storage()
            alone = storage.nbytes() == tensor.nbytes and storage.data_ptr() not in storages
            storages.add(storage.data_ptr())
            owned[str(number)] = tensor if alone else tensor.clone()
        save_file(owned, path, metadata={MARK: mark})
        path.chmod(0o666 & ~umask())  # safetensors makes it for its owner alone


def read_weights(path: Path, nbytes: int, mark: str) -> dict[int, torch.Tensor]:
    """The tensors of the weights' file by number, in large pages.

    Args:
        path: the file.
        nbytes: of all tensors.
        mark: what the file was written with.

    Raises:
        ArtifactError: it is not that file, or damaged.
    """
    try:
        stored = open_file(path)
        found_mark = _mark(path)
        if found_mark != mark:
            raise _other(path, f"it belongs to the artifact {found_mark}", f"that of {mark}")
        found = _read(stored)
    except (SchemeError, ValueError, OSError) as error:
        told = error.found if isinstance(error, SchemeError) else str(error)
        raise _other(path, told) from None
    total = sum(tensor.nbytes for tensor in found.values())
    if total != nbytes:
        raise _other(path, f"{total:,} bytes of tensors", f"{nbytes:,}, as the header says")
    return_pages()
    return found


def _mark(path: Path) -> str | None:
    from safetensors import safe_open

    with safe_open(str(path), "pt") as file:
        return (file.metadata() or {}).get(MARK)


def _other(path: Path, found: str, needed: str = "the file as it was written") -> ArtifactError:
    return ArtifactError(str(path), found, needed, "export the model again")


def _read(stored: Mapping[str, StoredTensor]) -> dict[int, torch.Tensor]:
    slabs, found, mapped = Slabs(), {}, 0
    for name, tensor in stored.items():
        room = found[int(name)] = slabs.empty(tensor.shape, tensor.dtype)
        _fill(room, tensor)
        mapped += min(room.nbytes, _MAPPED)
        if mapped >= _MAPPED:
            tensor.release()  # with everything of the file that was read so far
            mapped = 0
    return found


def _fill(room: torch.Tensor, tensor: StoredTensor) -> None:
    """Read a tensor, a run of rows at a time."""
    if room.nbytes <= _MAPPED or room.dim() == 0:
        room.copy_(tensor.load())
        return
    rows = max(1, _MAPPED * len(room) // room.nbytes)
    for start in range(0, len(room), rows):
        stop = min(start + rows, len(room))
        room[start:stop] = tensor.part(0, start, stop)
        tensor.release()
