"""Models that are split over several files.

Comes in: a path, and later the headers of the files it led to. Goes out: the files in order.
Always holds: all shards are there, each says its own place and the same number of shards, and
together they hold as many tensors as the first one promises.

File names are ``NAME-00001-of-00003.gguf``, counted from 1; the key ``split.no`` counts from 0.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from qcompile.errors import SchemeError
from qcompile.schemes.gguf.header import Header

_SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


def shard_paths(path: Path) -> list[Path]:
    """The files of the model that ``path`` belongs to, in order.

    Raises:
        SchemeError: a shard is missing, or a directory holds no model or more than one.
    """
    if os.path.isdir(path):
        path = _only_model(path)
    match = _SHARD.fullmatch(path.name)
    if match is None:
        return [path]
    count, number = int(match["count"]), int(match["number"])
    if not 1 <= number <= count:
        raise SchemeError(
            str(path), f"shard {number} of {count}", f"1 to {count}", "correct the file's name"
        )
    paths = [
        path.with_name(f"{match['stem']}-{index:05d}-of-{count:05d}.gguf")
        for index in range(1, count + 1)
    ]
    missing = [shard.name for shard in paths if not os.path.exists(shard)]
    if missing:
        shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if missing[8:] else "")
        raise SchemeError(
            str(path.parent),
            f"missing {shown}",
            f"all {count} shards",
            "download the missing files",
        )
    return paths


def _only_model(directory: Path) -> Path:
    try:
        files = sorted(file for file in directory.iterdir() if file.suffix == ".gguf")
    except OSError as error:
        raise SchemeError(
            str(directory), str(error), "a directory that can be listed", "check its permissions"
        ) from None
    models: dict[tuple[str, str], Path] = {}
    for file in files:
        match = _SHARD.fullmatch(file.name)
        models.setdefault((match["stem"], match["count"]) if match else (file.name, ""), file)
    if len(models) == 1:
        return next(iter(models.values()))
    found = ", ".join(file.name for file in models.values()) or "no .gguf file"
    raise SchemeError(
        str(directory), f"it holds {found}", "one GGUF model", "give the path of one file"
    )


def check_shards(paths: Sequence[str], headers: Sequence[Header]) -> None:
    """Raise SchemeError unless the headers are those of one complete model."""
    for index, (path, header) in enumerate(zip(paths, headers, strict=True)):
        number, count = header.metadata.get("split.no", 0), header.metadata.get("split.count", 1)
        if (number, count or 1) != (index, len(paths)):
            raise SchemeError(
                path,
                f"its header says split.no {number!r} of split.count {count!r}",
                f"split.no {index} of split.count {len(paths)}, as the file name says",
                "give the shards their original names: NAME-00001-of-00003.gguf and so on",
            )
    _check_names(paths, headers)
    total = sum(len(header.tensors) for header in headers)
    promised = headers[0].metadata.get("split.tensors.count", total)
    if len(paths) > 1 and promised != total:
        raise SchemeError(
            paths[0],
            f"the shards hold {total} tensors",
            f"{promised!r}, the split.tensors.count",
            "download the shards again, all from one release",
        )


def _check_names(paths: Sequence[str], headers: Sequence[Header]) -> None:
    owner: dict[str, str] = {}
    for path, header in zip(paths, headers, strict=True):
        for info in header.tensors:
            if info.name in owner:
                raise SchemeError(
                    path,
                    f"tensor {info.name!r} is also in {owner[info.name]}",
                    "each tensor in one shard",
                    "download the shards again, all from one release",
                )
            owner[info.name] = path
