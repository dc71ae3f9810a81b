"""First layers of zoo checkpoints, compiled for a CUDA device and run by Triton's interpreter.

Comes in: names of entries. Goes out: one JSON line for each, on stdout.
Always holds: the model has one layer, or all where layers differ in how they are quantized, and is
otherwise the checkpoint's own: embedding, last norm, head. What it is compared with is the same
model in float32 on decoded weights, with nothing of the compiler but the decoding, which other
tests compare with hashes of the zoo.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from typing import Any

import torch
from torch import nn

import qcompile
from qcompile.schemes import open_checkpoint
from support.zoo import Entry, entries, folder_entries, relative_l2

DEVICE = "cuda:sm90"
TOKENS = 6
# Entries whose layers differ.
WHOLE = ("gguf-potpourri", "gptq-w4-g128-dynamic-mixed")


def found_entries() -> dict[str, Entry]:
    """Every entry that is there whole, by name."""
    found = {n: e for n, e in folder_entries().items() if not e.facts.get("part")}
    return {**found, **entries("gguf", "dense"), **entries("gguf", "moe")}


class FirstLayers:
    """A checkpoint of which only some layers, and what is around the layers, are there."""

    def __init__(self, entry: Entry, layers: int) -> None:
        self.whole: Any = open_checkpoint(entry.path)
        self.layers = layers

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name)

    def build(self, dtype: torch.dtype) -> Any:
        """The model without values, and the parameters of the whole model."""
        model = self.whole.build(dtype)[0]
        self.shapes = shapes_of(model)
        del model.model.layers[self.layers :]
        model.config.num_hidden_layers = len(model.model.layers)
        return model

    def catalogue(self, parameters: Any, kept: Any = ()) -> Any:
        """The weights of some parameters, after all have been bound."""
        bound = self.whole.catalogue(self.shapes, kept)
        return {name: weight for name, weight in bound.items() if name in parameters}


def shapes_of(model: Any) -> dict[str, tuple[int, ...]]:
    """The parameters of a model under all of their names."""
    return {n: tuple(p.shape) for n, p in model.named_parameters(remove_duplicate=False)}


def plain(checkpoint: FirstLayers) -> Any:
    """The slice in float32 on decoded weights."""
    model = checkpoint.build(torch.float32)
    for name, weight in checkpoint.catalogue(shapes_of(model)).items():
        owner, _, key = name.rpartition(".")
        values = weight.dequantize().float().clone()
        setattr(model.get_submodule(owner), key, nn.Parameter(values, requires_grad=False))
    return model


def row(name: str) -> dict[str, Any]:
    """What one slice says."""
    entry, start = found_entries()[name], time.perf_counter()
    ids = torch.tensor([entry.sequences["16"][:TOKENS]])
    checkpoint: Any = FirstLayers(entry, 4 if name in WHOLE else 1)
    with torch.no_grad():
        expected = plain(checkpoint)(ids).logits
    model: Any = qcompile.optimize(
        checkpoint.build(torch.float16),
        checkpoint.scheme,
        DEVICE,
        checkpoint,
        torch.float16,
        emulate=True,
        on_unsupported="dequantize",
    )
    found = model(ids).logits
    plan = model.qcompile.plan
    return {
        "name": name,
        "error": relative_l2(found, expected),
        "kernels": Counter(e.kernel.name for e in plan.entries if e.kernel is not None),
        "floats": sum(e.dequantize for e in plan.entries),
        "layers": len({e.site.name.split(".")[2] for e in plan.entries if "layers" in e.site.name}),
        "seconds": round(time.perf_counter() - start, 2),
    }


if __name__ == "__main__":
    for one in sys.argv[1:]:
        print(json.dumps(row(one)), flush=True)
