"""GGUF files, mapped into memory.

Comes in: a file, one shard of a split model, or the directory that holds either. Goes out: its
metadata, where its tensors lie, and references to its weights.
Always holds: opening reads headers only; a weight's bytes are views of a private mapping that
nothing writes to, so pages cost memory only until ``release``; every refusal is a SchemeError that
names the file and the byte or the tensor.

A file must not shrink while it is open: the operating system answers a read past the new end by
ending the process.
"""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from qcompile.errors import SchemeError, nearest
from qcompile.layout import QuantizedTensor, Shape
from qcompile.schemes.gguf import edges as _edges  # noqa: F401 - registers them with the layouts
from qcompile.schemes.gguf.blocks import SPECS, layout_name
from qcompile.schemes.gguf.header import Header, TensorInfo, parse_header
from qcompile.schemes.gguf.metadata import Cursor, Metadata
from qcompile.schemes.gguf.shards import check_shards, shard_paths
from qcompile.schemes.gguf.type_table import TYPES
from qcompile.spec import FloatSpec, Spec
from qcompile.weight import Rows, WeightRef


@dataclass(frozen=True)
class GGUFFile:
    """An open GGUF model of one or several files.

    Attributes:
        path: the path it was opened by.
        metadata: keys and values, of the first file when there are several.
        tensors: every tensor by the file's name for it, in the order of the files.
        mappings: the mapped files by their path.
    """

    path: Path
    metadata: Metadata
    tensors: Mapping[str, TensorInfo]
    mappings: Mapping[str, mmap.mmap]

    @staticmethod
    def open(path: str | os.PathLike[str]) -> GGUFFile:
        """Open a file, any shard of a split model, or a directory that holds one model.

        Raises:
            SchemeError: nothing there, not GGUF, damaged, or a shard is missing.
        """
        mappings: dict[str, mmap.mmap] = {}
        headers: list[Header] = []
        try:
            for shard in shard_paths(Path(path)):
                mappings[str(shard)] = mapping = _map(shard)
                headers.append(parse_header(Cursor(str(shard), mapping, len(mapping))))
            check_shards(list(mappings), headers)
        except SchemeError:
            _close(mappings.values())
            raise
        tensors = {info.name: info for header in headers for info in header.tensors}
        return GGUFFile(Path(path), headers[0].metadata, tensors, mappings)

    def weight(self, name: str) -> WeightRef:
        """A reference to one tensor, under the file's name; reads no bytes of it.

        Raises:
            SchemeError: no such tensor, or its type cannot be a weight.
        """
        if name not in self.tensors:
            raise SchemeError(
                str(self.path),
                f"no tensor {name!r}",
                "a name that the file lists",
                f"look at the names of the {len(self.tensors)} tensors"
                f"{nearest(name, self.tensors)}",
            )
        info = self.tensors[name]
        spec = _spec_of(info)
        mapping = self.mappings[info.file]

        def read(rows: Rows) -> QuantizedTensor:
            part = _view(mapping, info, spec)[rows]
            shape: Shape = (part.shape[0], *info.shape[1:])
            return QuantizedTensor(spec, layout_name(spec), shape, {"data": part})

        return WeightRef(
            name=name,
            spec=spec,
            layout=layout_name(spec),
            shape=info.shape,
            read=read,
            source=f"{info.file}: {name}",
            release=lambda: _drop_pages(mapping, info),
        )

    def close(self) -> None:
        """Unmap the files. A mapping that a tensor still views stays until the tensor is gone."""
        _close(self.mappings.values())

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _map(path: Path) -> mmap.mmap:
    try:
        # A named pipe would block in open().
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise _unreadable(path, "not a regular file")
        if not status.st_size:
            raise _unreadable(path, "an empty file")
        with path.open("rb") as file:
            # Private, because torch warns about tensors over a read-only buffer.
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except FileNotFoundError:
        raise _unreadable(path, "no such file") from None
    except (OSError, ValueError) as error:
        raise _unreadable(path, str(error)) from None


def _unreadable(path: Path, found: str) -> SchemeError:
    return SchemeError(str(path), found, "a GGUF file", "check the path and the download")


def _close(mappings: Iterable[mmap.mmap]) -> None:
    for mapping in mappings:
        try:
            mapping.close()
        except BufferError:
            continue


def _spec_of(info: TensorInfo) -> Spec:
    where = f"{info.file}: tensor {info.name!r}"
    if info.type_id not in TYPES:
        raise SchemeError(
            where,
            f"its type is {info.type_id} ({info.type_name}), whose blocks are not known",
            f"one of {', '.join(sorted(SPECS))}",
            "convert the tensor to a listed type",
        )
    if info.type_name not in SPECS:
        raise SchemeError(
            where,
            f"its type is {info.type_name}, which holds no weights",
            f"one of {', '.join(sorted(SPECS))}",
            "convert the tensor to f32, or leave it out",
        )
    spec = SPECS[info.type_name]
    if len(info.shape) == 1 and not isinstance(spec, FloatSpec):
        raise SchemeError(
            where,
            f"a vector of quantized type {info.type_name}",
            "vectors in f32, f16 or bf16",
            "convert the file again: converters keep vectors in f32",
        )
    return spec


def _view(mapping: mmap.mmap, info: TensorInfo, spec: Spec) -> torch.Tensor:
    """The stored tensor as a view of the mapping, uint8 ``(..., N, bytes)`` when quantized."""
    if mapping.closed or info.nbytes is None:
        raise SchemeError(
            f"{info.file}: tensor {info.name!r}",
            "its file was closed",
            "an open file",
            "close the file after its weights were packed",
        )
    data = torch.frombuffer(mapping, dtype=torch.uint8, offset=info.offset, count=info.nbytes)
    if not isinstance(spec, FloatSpec):
        return data.view(*info.shape[:-1], -1)
    if info.offset % spec.dtype.itemsize:
        data = data.clone()
    return data.view(spec.dtype).view(info.shape)


def _drop_pages(mapping: mmap.mmap, info: TensorInfo) -> None:
    if mapping.closed or info.nbytes is None or not hasattr(mapping, "madvise"):
        return
    start = info.offset // mmap.PAGESIZE * mmap.PAGESIZE
    # Neighbours that share an edge page read it from the file again: nothing was written to it.
    mapping.madvise(mmap.MADV_DONTNEED, start, info.offset + info.nbytes - start)
