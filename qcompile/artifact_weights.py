"""The weights of an artifact: packed weights and all else that its graphs hold.

Comes in: constants of graphs, or a file. Goes out: the file, or tensors by number.
Always holds: what graphs share is stored once; a file that does not hold what was written is
refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from qcompile.errors import ArtifactError, LowerError, SchemeError
from qcompile.memory import Slabs, return_pages
from qcompile.schemes.folder.stored import StoredTensor, open_file

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
        """The number of a tensor; graphs that share one get the same."""
        if not tensor.is_contiguous():
            raise LowerError(
                "a constant of the graph",
                f"{list(tensor.shape)} with strides {tensor.stride()}",
                "rows that lie one after the other",
                "report this: such a tensor cannot be saved",
            )
        key = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape))
        if key not in self._kept:
            self._kept[key] = len(self._tensors)
            self._tensors.append(tensor)
        return self._kept[key]

    def write(self, path: Path) -> None:
        """All of them in one file, by number."""
        from safetensors.torch import save_file

        # Slabs hold several tensors in one piece of memory, each as a storage of its own.
        save_file({str(n): tensor for n, tensor in enumerate(self._tensors)}, path)


def read_weights(path: Path, nbytes: int) -> dict[int, torch.Tensor]:
    """The tensors of the weights' file by number, in large pages."""
    try:
        stored = open_file(path)
        slabs, found, mapped = Slabs(), {}, 0
        for name, tensor in stored.items():
            room = found[int(name)] = slabs.empty(tensor.shape, tensor.dtype)
            _fill(room, tensor)
            mapped += min(room.nbytes, _MAPPED)
            if mapped >= _MAPPED:
                tensor.release()  # with everything of the file that was read so far
                mapped = 0
    except (SchemeError, ValueError) as error:
        told = error.found if isinstance(error, SchemeError) else str(error)
        raise ArtifactError(
            str(path), told, "the file as it was written", "export the model again"
        ) from None
    total = sum(tensor.nbytes for tensor in found.values())
    if total != nbytes:
        raise ArtifactError(
            str(path),
            f"{total:,} bytes of tensors",
            f"{nbytes:,}, as the header says",
            "export the model again",
        )
    return_pages()
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
