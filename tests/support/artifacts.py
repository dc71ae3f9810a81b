"""Tiny language models, saved and as ``load`` compiles them.

Comes in: a checkpoint. Goes out: both, and what they answer.
Always holds: what is expected comes from ``load``'s model, which reads a text at once, and keeps
keys and values as transformers does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import qcompile
from qcompile.artifact import Artifact
from support.gguf_writer import tiny_model, write_model
from support.llama import llama_config, llama_layers, write_llama
from support.pack_gptq import Gptq, gptq
from support.packers import Packed
from support.zoo import relative_l2

TOKENS = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": [*(f"<{index}>" for index in range(93)), "a", "b", "ab"],
    "tokenizer.ggml.token_type": [1] * 96,
    "tokenizer.ggml.merges": ["a b"],
}


@dataclass(frozen=True)
class Saved:
    """A checkpoint, its artifact, and its compiled model."""

    source: Path
    artifact: Artifact
    model: Any

    @property
    def folder(self) -> Path:
        return self.artifact.path

    def ids(self, tokens: int) -> torch.Tensor:
        size = self.artifact.header.vocabulary
        return torch.randint(size, (tokens,), generator=torch.Generator().manual_seed(tokens))


def saved(source: Path, out: Path, context: int = 512, **options: Any) -> Saved:
    """Export a checkpoint, and load it."""
    torch._dynamo.reset()
    artifact = qcompile.export(source, out, context=context, **options)
    return Saved(source, artifact, qcompile.load(source, emitter="eager", **options)[0])


def gguf_model(path: Path, architecture: str, types: dict[str, str], **changes: Any) -> Path:
    """A file with a tokenizer; a model of one layer unless something else is said."""
    model = tiny_model(architecture, **{"num_hidden_layers": 1, **changes})
    return write_model(path, architecture, model, types=types, metadata=TOKENS)


def llama_folder(place: Path) -> Path:
    """A GPTQ folder of one layer without a tokenizer; its head is float."""

    def four_bits(name: str, n: int, k: int, seed: int) -> Packed | None:
        return None if name == "lm_head" else gptq(n, k, Gptq(4, 32), seed)

    config = llama_config(num_hidden_layers=1, attn_implementation="sdpa")
    return write_llama(place, config, llama_layers(config, four_bits), Gptq(4, 32).config)


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The model's, ``[T, V]``."""
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=ids[None]).logits[0]
    return found


def read(artifact: Artifact, ids: torch.Tensor, parts: Sequence[int]) -> torch.Tensor:
    """The artifact's after a text in parts, ``[V]``."""
    artifact.clear()
    for part in ids[: sum(parts)].split(list(parts)):
        found = artifact.read(part)
    return found


def agrees(given: Saved, *parts: int) -> float:
    """How far both are apart after a text in parts."""
    ids = given.ids(sum(parts))
    return relative_l2(read(given.artifact, ids, parts), logits(given.model, ids)[-1])


def says(model: Any, ids: torch.Tensor, count: int) -> list[int]:
    """What the model says next, greedily, with its own cache; no end ends it."""
    made: list[int] = []
    cache, given = None, ids[None]
    with torch.no_grad():
        for _ in range(count):
            found = model(input_ids=given, cache=cache, use_cache=True)
            cache, given = found.cache, found.logits[:, -1].argmax(-1)[None]
            made.append(int(given))
    return made
