"""What the folder of an artifact says of itself.

Comes in: ``artifact.json``. Goes out: the same as a record.
Always holds: a header of another format, or one with a missing or odd entry, is refused by name.

    artifact.json          this
    plan.json, plan.txt    the plan, for people and programs
    weights.safetensors    packed weights and other constants, "0", "1", ...
    prompt.so, step.so     code for many tokens and for one
    tokenizer.json, ...    the tokenizer as transformers writes it, where there is one
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qcompile.errors import ArtifactError

HEADER, WEIGHTS = "artifact.json", "weights.safetensors"
FORMAT = 1


@dataclass(frozen=True)
class Graph:
    """Code of one graph.

    Attributes:
        inputs: ``ids``, ``positions`` or the number of a cache, in the order the code takes them.
        constants: number of the tensor in the weights' file by the code's own name for it.
    """

    inputs: tuple[str, ...]
    constants: Mapping[str, int]


@dataclass(frozen=True)
class Header:
    """Everything about an artifact but its bytes.

    Attributes:
        format: of this record.
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
    except FileNotFoundError:
        raise ArtifactError(
            str(folder), f"no {HEADER}", "the folder of an artifact", "make one: qcompile export"
        ) from None
    except (OSError, ValueError) as error:
        raise _damaged(path, f"it cannot be read: {error}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else None
        raise _damaged(path, f"format {found!r}", f"format {FORMAT}")
    try:
        return _header(content)
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(path, f"an entry is missing or odd: {error}") from None


def _header(content: dict[str, Any]) -> Header:
    graphs = {
        name: Graph(tuple(graph["inputs"]), {k: int(v) for k, v in graph["constants"].items()})
        for name, graph in content["graphs"].items()
    }
    few, many = content["rows"]
    given = {
        **content,
        "graphs": {name: graphs[name] for name in ("prompt", "step")},
        "caches": tuple(tuple(map(int, shape)) for shape in content["caches"]),
        "rows": (int(few), int(many)),
        "ends": tuple(map(int, content["ends"])),
    }
    return Header(**given)


def _damaged(path: Path, found: str, needed: str = "the file as it was written") -> ArtifactError:
    return ArtifactError(str(path), found, needed, "export the model again")
