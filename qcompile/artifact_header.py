"""What the folder of an artifact says of itself.

Comes in: ``artifact.json``. Goes out: the same as a record.
Always holds: a header of another format, or one with a missing or odd entry, is refused by name.

    artifact.json          this
    plan.json, plan.txt    the plan, for people and programs
    weights.safetensors    packed weights and other constants, "0", "1", ...
    prompt.so, step.so     code for many tokens and for one; a .json beside it where it calls ops
                           by their schemas
    tokenizer.json, ...    the tokenizer as transformers writes it, where there is one
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from qcompile.errors import ArtifactError

HEADER, WEIGHTS = "artifact.json", "weights.safetensors"
FORMAT = 1


@dataclass(frozen=True)
class Graph:
    """Code of one graph.

    Attributes:
        inputs: ``ids``, ``positions`` or the number of a cache, in the order the code takes them.
        constants: number of the tensor in the weights' file by the code's own name for it.
        files: SHA-256 of the code's files by name.
    """

    inputs: tuple[str, ...]
    constants: Mapping[str, int]
    files: Mapping[str, str]


@dataclass(frozen=True)
class Header:
    """Everything about an artifact but its bytes.

    Attributes:
        format: of this record.
        mark: a name that no other artifact has; the weights' file has it too.
        qcompile: version that wrote it.
        device, target: where it runs.
        code: what its code depends on, in the backend's words.
        scheme, dtype, numerics: what was compiled.
        sources: SHA-256 of the checkpoint's files by name.
        context: tokens that a text may have.
        rows: fewest and most tokens that the code of prompts takes at once.
        vocabulary: logits of a token.
        ends: ids that end a text.
        caches: shapes of keys and values, layer by layer.
        cache_dtype: their dtype.
        weight_bytes: of all tensors in the weights' file.
        graphs: ``prompt`` and ``step``.
        error: largest relative L2 difference of logits from the model before it was saved.
    """

    format: int
    mark: str
    qcompile: str
    device: str
    target: str
    code: Mapping[str, str]
    scheme: str
    dtype: str
    numerics: str
    sources: Mapping[str, str]
    context: int
    rows: tuple[int, int]
    vocabulary: int
    ends: tuple[int, ...]
    caches: tuple[tuple[int, ...], ...]
    cache_dtype: str
    weight_bytes: int
    graphs: Mapping[str, Graph]
    error: float

    def as_json(self) -> dict[str, Any]:
        """The record as JSON has it."""
        return asdict(self)


def is_artifact(path: str | Path) -> bool:
    """Whether a path is the folder of an artifact."""
    return Path(path).expanduser().joinpath(HEADER).is_file()


def read_header(folder: Path) -> Header:
    """The header of a folder.

    Raises:
        ArtifactError: there is none, it is damaged, or of another format.
    """
    path = folder / HEADER
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise ArtifactError(
            str(folder), f"no {HEADER}", "the folder of an artifact", "make one: qcompile export"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, f"it cannot be read: {error}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else None
        raise _damaged(path, f"format {found!r}", f"format {FORMAT}")
    try:
        return _header(content)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(path, f"an entry is missing or odd: {error}") from None


def _header(content: dict[str, Any]) -> Header:
    graphs = {name: _graph(content["graphs"][name]) for name in ("prompt", "step")}
    few, many = map(_count, content["rows"])
    given = {
        **content,
        "graphs": graphs,
        "caches": tuple(tuple(map(_count, shape)) for shape in content["caches"]),
        "rows": (few, many),
        "ends": tuple(map(_count, content["ends"])),
    }
    header = Header(**given)
    _check(header)
    return header


def _graph(content: dict[str, Any]) -> Graph:
    numbers = {_text(name): _count(number) for name, number in content["constants"].items()}
    files = {_text(name): _text(digest) for name, digest in content["files"].items()}
    return Graph(tuple(map(_text, content["inputs"])), numbers, files)


def _check(header: Header) -> None:
    """Raise ValueError for an entry that means nothing."""
    for name in ("mark", "qcompile", "device", "target", "scheme", "dtype", "numerics"):
        _text(getattr(header, name))
    for name in ("code", "sources"):
        for key, value in getattr(header, name).items():
            _text(key), _text(value)
    for name in ("format", "context", "vocabulary", "weight_bytes"):
        _count(getattr(header, name))
    if not isinstance(header.error, float) or header.error < 0:
        raise ValueError(f"error {header.error!r}")
    dtype = getattr(torch, _text(header.cache_dtype), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"cache_dtype {header.cache_dtype!r}")
    if not 1 < header.rows[0] <= header.rows[1]:
        raise ValueError(f"rows {header.rows}")
    for shape in header.caches:
        if len(shape) != 4 or shape[0] != 1 or shape[2] != header.context:
            raise ValueError(f"a cache of {shape} for a context of {header.context}")
    places = {"ids", "positions", *map(str, range(len(header.caches)))}
    for graph in header.graphs.values():
        if not places.issuperset(graph.inputs):
            raise ValueError(f"inputs {', '.join(graph.inputs)}")


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} in the place of a text")
    return value


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} in the place of a number")
    return value


def digest_of(path: Path) -> str:
    """SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def _damaged(path: Path, found: str, needed: str = "the file as it was written") -> ArtifactError:
    return ArtifactError(str(path), found, needed, "export the model again")
