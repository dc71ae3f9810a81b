"""Which files of a folder hold the tensors.

Comes in: a folder. Goes out: its tensors by name, unread.
Always holds: an index is followed inside the folder only; every shard it names is there; a tensor
is stored once.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from qcompile.errors import SchemeError
from qcompile.schemes.folder.settings import read_json
from qcompile.schemes.folder.stored import StoredTensor, open_file

_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_NO_WEIGHTS = ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth")


def has_tensors(folder: Path) -> bool:
    """Whether a folder seems to hold tensors. Opens no file."""
    return folder.is_dir() and bool(_index(folder) or _whole_files(folder))


def open_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a folder.

    Safetensors are preferred to pickles; an index to the files that happen to be there.

    Raises:
        SchemeError: no file of tensors; an index that leaves the folder, names a file that is not
            there or disagrees with the files; a tensor that two files store.
    """
    index = _index(folder)
    if index is None:
        files = _whole_files(folder)
        if not files:
            raise SchemeError(
                str(folder),
                "no file of tensors",
                "*.safetensors, or pytorch_model.bin",
                "check that the download is complete",
            )
        return _merge(files)
    placed = _weight_map(index)
    shards = {name: _inside(folder, name, index) for name in dict.fromkeys(placed.values())}
    missing = [name for name, path in shards.items() if not path.is_file()]
    if missing:
        raise SchemeError(
            str(index),
            f"{len(missing)} of {len(shards)} shards are missing: {', '.join(missing)}",
            "every shard that the index names",
            "download them into the folder",
        )
    found = _merge(shards.values())
    for name, shard in placed.items():
        if name not in found or found[name].file != shards[shard]:
            actual = f"it is in {found[name].file.name}" if name in found else "it is in no shard"
            raise SchemeError(
                f"{index}: {name}",
                f"said to be in {shard}; {actual}",
                "an index that agrees with its shards",
                "download index and shards again, from one place",
            )
    return found


def _index(folder: Path) -> Path | None:
    for name in _INDEXES:
        if (folder / name).is_file():
            return folder / name
    named = sorted(folder.glob("*.safetensors.index.json"))
    return named[0] if named else None


def _whole_files(folder: Path) -> list[Path]:
    """Files of tensors in a folder without an index."""
    safe = sorted(folder.glob("*.safetensors"))
    if (folder / "model.safetensors") in safe:
        return [folder / "model.safetensors"]
    if safe:
        return safe
    pickles = [*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")]
    return sorted(path for path in pickles if path.name not in _NO_WEIGHTS)


def _weight_map(index: Path) -> dict[str, str]:
    content = read_json(index).get("weight_map")
    if not isinstance(content, dict) or not content:
        raise SchemeError(
            str(index), "no weight_map", "names of tensors and their files", "download it again"
        )
    for name, shard in content.items():
        if not isinstance(shard, str) or not shard:
            raise SchemeError(
                f"{index}: {name}", f"{shard!r}", "the name of a file", "download it again"
            )
    return content


def _inside(folder: Path, name: str, index: Path) -> Path:
    """The path of a shard. A file may be a link, as in the cache of the Hub; a folder may not."""
    parts = PurePosixPath(name)
    path = folder / name
    leaves = parts.is_absolute() or ".." in parts.parts or "\\" in name or ":" in name
    if leaves or not path.parent.resolve().is_relative_to(folder.resolve()):
        raise SchemeError(
            f"{index}",
            f"it names the file {name!r}, which is not in its folder",
            "names of files in the folder",
            "do not use this checkpoint unless you know where it comes from",
        )
    return path


def _merge(files: Iterable[Path]) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    for path in files:
        for name, tensor in open_file(path).items():
            if name in found:
                raise SchemeError(
                    f"{path}: {name}",
                    f"also in {found[name].file.name}",
                    "every tensor in one file",
                    "remove the file that does not belong to this checkpoint",
                )
            found[name] = tensor
    return found
