"""Checkpoint schemes: how a family of tools stores quantized weights.

Comes in: a path. Goes out: an open checkpoint.
Always holds: a scheme is one file or folder that answers to the ``Scheme`` protocol; it knows
nothing of devices; schemes of other packages come by the entry point group ``qcompile.schemes``.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from qcompile.artifact_header import is_artifact
from qcompile.errors import OptionError, SchemeError, nearest
from qcompile.layout import Shape
from qcompile.site import Site
from qcompile.weight import WeightRef

# Name of the scheme -> module that defines ``SCHEME``.
_BUILT_IN = {
    "compressed_tensors": "qcompile.schemes.compressed_tensors.scheme",
    "gguf": "qcompile.schemes.gguf.scheme",
    "auto_round": "qcompile.schemes.auto_round",
    "awq": "qcompile.schemes.awq.scheme",
    "gptq": "qcompile.schemes.gptq.scheme",
}


class Checkpoint(Protocol):
    """An open checkpoint: headers are read, weights are not."""

    @property
    def scheme(self) -> str:
        """Name of its scheme."""

    @property
    def path(self) -> Path:
        """The file or folder."""

    @property
    def tensors(self) -> Mapping[str, WeightRef]:
        """Every tensor under the file's own name, rows as stored."""

    def dequantize(self, name: str) -> torch.Tensor:
        """A tensor as float32 ``[N, K]`` (``[E, N, K]`` for experts), rows as stored.

        Raises:
            SchemeError: there is no tensor of this name.
        """

    def facts(self) -> Mapping[str, object]:
        """What the headers say, for ``qcompile inspect``."""

    def notes(self) -> tuple[str, ...]:
        """Facts that were read and do not matter, for the plan."""

    def sites(self) -> list[Site]:
        """The sites of the model the file describes, from headers alone."""

    def floats(self) -> list[WeightRef]:
        """The tensors stored as plain numbers, under the model's names."""

    def catalogue(
        self, parameters: Mapping[str, Shape], kept: Collection[str] = ()
    ) -> Mapping[str, WeightRef]:
        """Weights by the model's parameter names, each bound exactly once.

        Args:
            parameters: names and shapes; a tied parameter stands under each of its names.
            kept: parameters that stay as the module has them, whether or not there is a tensor.

        Raises:
            SchemeError: a parameter or a tensor is left over, or shapes differ.
        """

    def build(self, dtype: torch.dtype) -> tuple[nn.Module, object]:
        """The Hugging Face model on the meta device and its tokenizer."""


class Scheme(Protocol):
    """A family of checkpoints."""

    @property
    def name(self) -> str:
        """What ``scheme=`` calls it."""

    def claims(self, path: Path) -> bool:
        """Whether the file or folder looks like one of its checkpoints. Reads a few bytes."""

    def open(self, path: Path) -> Checkpoint:
        """Read the headers.

        Raises:
            SchemeError: there is nothing, or it is damaged or of another scheme.
        """


def names() -> tuple[str, ...]:
    """Every known scheme."""
    found = entry_points(group="qcompile.schemes")
    return tuple(sorted({*_BUILT_IN, *(entry.name for entry in found)}))


def scheme_of(name: str) -> Scheme:
    """The scheme of this name. Raises OptionError for an unknown one."""
    if name in _BUILT_IN:
        module = importlib.import_module(_BUILT_IN[name])
        return module.SCHEME  # type: ignore[no-any-return]
    for entry in entry_points(group="qcompile.schemes"):
        if entry.name == name:
            return entry.load()  # type: ignore[no-any-return]
    raise OptionError(
        f"scheme {name!r}",
        "unknown",
        f"one of auto, {', '.join(names())}",
        f"name a known scheme{nearest(name, names())}",
    )


def open_checkpoint(path: str | Path, scheme: str = "auto") -> Checkpoint:
    """Open a checkpoint.

    Args:
        path: a file, or a folder that holds one checkpoint.
        scheme: its scheme, or ``auto`` to ask every scheme.

    Raises:
        SchemeError: there is nothing, or no scheme claims it.
    """
    for name, given in (("path", path), ("scheme", scheme)):
        if not isinstance(given, (str, Path) if name == "path" else str) or not str(given):
            raise OptionError(
                f"{name}={given!r}",
                f"a {type(given).__name__}",
                "a text that is not empty",
                "pass one",
            )
    place = Path(path).expanduser()
    if scheme != "auto":
        return scheme_of(scheme).open(place)
    if not place.exists():
        raise SchemeError(str(place), "no such file or folder", "a checkpoint", "check the path")
    if is_artifact(place):
        raise SchemeError(
            str(place),
            "a saved compilation, which is no checkpoint any more",
            "the checkpoint that it was exported from",
            "run it: qcompile.open_artifact(path), or qcompile generate PATH",
        )
    for name in names():
        candidate = scheme_of(name)
        if candidate.claims(place):
            return candidate.open(place)
    if place.is_dir():
        from qcompile.schemes.folder.claim import unclaimed

        raise unclaimed(place, names())
    raise SchemeError(
        str(place),
        f"no scheme knows this; {describe(place)}",
        f"a checkpoint of one of the schemes {', '.join(names())}",
        "point to a .gguf file, or to the folder of a checkpoint",
    )


def describe(path: Path) -> str:
    """What a file looks like, in a few words."""
    with path.open("rb") as file:
        head = file.read(16)
    if not head:
        return "the file is empty"
    return f"it starts with the bytes {head!r}"
