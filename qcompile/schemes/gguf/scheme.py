"""The ``gguf`` scheme, as the compiler sees it.

Comes in: a path. Goes out: an open checkpoint.
Always holds: everything is decided by headers; tensors keep the file's names here and get the
model's names only in ``catalogue`` and ``sites``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

from qcompile.layout import Shape
from qcompile.schemes.gguf import edges as _edges  # noqa: F401 - registers the edges
from qcompile.schemes.gguf.architectures import KNOWN
from qcompile.schemes.gguf.model import buffers, catalogue, model_sites, model_weights
from qcompile.schemes.gguf.reader import GGUFFile
from qcompile.schemes.gguf.values import read_configuration
from qcompile.site import Site
from qcompile.spec import is_quantized
from qcompile.weight import WeightRef


@dataclass
class GGUFCheckpoint:
    """An open GGUF model."""

    file: GGUFFile
    scheme: str = "gguf"

    @property
    def path(self) -> Path:
        """The path it was opened by."""
        return self.file.path

    @cached_property
    def tensors(self) -> Mapping[str, WeightRef]:
        """Every tensor whose type can be a weight, under the file's name, rows as stored."""
        return {name: self.file.weight(name) for name in self.file.tensors}

    def dequantize(self, name: str) -> torch.Tensor:
        """A tensor as float32 ``[N, K]`` (``[E, N, K]`` for experts), rows as stored."""
        return self.file.weight(name).dequantize()

    def facts(self) -> Mapping[str, object]:
        """The metadata."""
        return self.file.metadata

    def notes(self) -> tuple[str, ...]:
        """Metadata keys that do not matter here; keys that change the model are read or refused."""
        if self.file.metadata.get("general.architecture") not in KNOWN:
            return ()  # bound by its own tensor names
        return read_configuration(self.file).ignored

    def sites(self) -> list[Site]:
        """The sites of the model the file describes."""
        return model_sites(self.file)

    def floats(self) -> list[WeightRef]:
        """The tensors stored as plain numbers, under the model's names."""
        return [w for w in model_weights(self.file).values() if not is_quantized(w.spec)]

    def catalogue(
        self, parameters: Mapping[str, Shape], kept: Collection[str] = ()
    ) -> Mapping[str, WeightRef]:
        """Weights by the model's parameter names, each bound exactly once."""
        return catalogue(self.file, parameters, kept)

    def buffers(self, names: Collection[str]) -> Mapping[str, WeightRef]:
        """Weights for those of some buffers, by the model's names, that the file holds."""
        return buffers(self.file, names)

    def build(self, dtype: torch.dtype) -> tuple[nn.Module, object]:
        """The Hugging Face model on the meta device and its tokenizer."""
        from qcompile.hf import build_skeleton
        from qcompile.schemes.gguf.config import build_config, build_generation_config
        from qcompile.schemes.gguf.tokenizer import build_tokenizer

        config = build_config(self.file)
        tokenizer = build_tokenizer(self.file.metadata, str(self.path))
        self.file.metadata.forget()
        model = build_skeleton(config, dtype)
        model.generation_config = build_generation_config(self.file)
        return model, tokenizer


@dataclass(frozen=True)
class GGUFScheme:
    """Files that start with ``GGUF``, and folders with such files."""

    name: str = "gguf"

    def claims(self, path: Path) -> bool:
        """Whether the path ends in ``.gguf``, starts with ``GGUF`` or holds ``.gguf`` files."""
        if path.is_dir():
            return any(path.glob("*.gguf"))
        if path.suffix.lower() == ".gguf":
            return True
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"

    def open(self, path: Path) -> GGUFCheckpoint:
        """Read the headers."""
        return GGUFCheckpoint(GGUFFile.open(path))


SCHEME = GGUFScheme()
