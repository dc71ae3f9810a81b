"""A checkpoint folder that is there as a whole or not at all.

Comes in: a path, and tensors that are made when their file is written. Goes out: a folder of
safetensors, with an index when there are several files.
Always holds: the folder is written beside its place and renamed; when anything fails, the place is
as it was and nothing is left beside it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from qcompile.errors import OptionError

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Unit:
    """Tensors that go into one file.

    Attributes:
        nbytes: bytes of them all.
        make: the tensors by name.
    """

    nbytes: int
    make: Callable[[], Mapping[str, torch.Tensor]]


@contextlib.contextmanager
def new_folder(path: str | Path, overwrite: bool) -> Iterator[Path]:
    """A folder to write to; it takes its place when the block ends without an error.

    Args:
        path: the place. Its parents are made.
        overwrite: whether a folder with something in it may be replaced.

    Raises:
        OptionError: the place is a file, or a folder that is not empty.
    """
    place = Path(path).expanduser().resolve()
    check_place(place, overwrite)
    place.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent))
    try:
        yield fresh
        fresh.chmod(0o777 & ~umask())  # mkdtemp's folders are for their owner alone
        _take_place(fresh, place)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def write_shards(folder: Path, units: Sequence[Unit], limit: int) -> None:
    """Write tensors as safetensors files.

    Args:
        folder: where.
        units: what goes into one file stays together, in this order.
        limit: bytes of a file; a unit that is larger has a file of its own.
    """
    from safetensors.torch import save_file

    shards = _shards(units, limit)
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = "model.safetensors"
        if len(shards) > 1:
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors: dict[str, torch.Tensor] = {}
        for unit in shard:
            tensors.update(unit.make())
        save_file(tensors, folder / name, metadata={"format": "pt"})
        (folder / name).chmod(0o666 & ~umask())  # safetensors makes it for its owner alone
        places.update(dict.fromkeys(tensors, name))
    if len(shards) > 1:
        total = sum(unit.nbytes for unit in units)
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": places})


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write a JSON object, readable."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _shards(units: Sequence[Unit], limit: int) -> list[list[Unit]]:
    shards: list[list[Unit]] = [[]]
    size = 0
    for unit in units:
        if shards[-1] and size + unit.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(unit)
        size += unit.nbytes
    return shards


def check_place(place: Path, overwrite: bool) -> None:
    """Raise OptionError where ``new_folder`` would."""
    if place.exists() and not place.is_dir():
        raise OptionError(str(place), "is a file", "a folder", "name another place")
    if place.is_dir() and any(place.iterdir()) and not overwrite:
        raise OptionError(
            str(place),
            "is not empty",
            "a new or empty folder",
            "name another place, or pass overwrite=True to replace the folder and all in it",
        )


def _take_place(fresh: Path, place: Path) -> None:
    if not place.exists():
        os.rename(fresh, place)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{place.name}.old.", dir=place.parent))
    os.rename(place, old)  # onto the empty folder
    try:
        os.rename(fresh, place)
    except BaseException:
        os.rename(old, place)
        raise
    shutil.rmtree(old, ignore_errors=True)


def umask() -> int:
    """The process's mask of modes, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
