"""A small program with every kind of node that the passes rewrite, and how to run it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from torch.nn import functional

from qcompile.program import Program, stored_parts
from qcompile.spec import AffineSpec, FloatSpec
from qcompile.weight import WeightRef
from support.weights import random_weight, reference

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
SPEC = AffineSpec(4, 8, "offset")


def catalogue() -> dict[str, WeightRef]:
    """Three quantized weights and a bias that is not."""
    shapes = {"embed.weight": (12, 8), "first.weight": (16, 8), "second.weight": (8, 16)}
    weights = {
        name: reference(random_weight(SPEC, n, k, seed), name)
        for seed, (name, (n, k)) in enumerate(shapes.items())
    }
    spec = FloatSpec(torch.float32)
    bias = WeightRef("first.bias", spec, "float", (16,), lambda rows: NotImplemented, "memory")
    return {**weights, "first.bias": bias}


class Recorder(fx.Interpreter):
    """Runs a graph and notes every value, as capture does."""

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op != "output":
            n.meta["example_value"] = value
        return value


def toy() -> tuple[Program, list[torch.Tensor]]:
    """An embedding, a linear with a bias, a product, a tied head; and the graph's inputs."""
    graph = fx.Graph()
    ids, embed, first, bias, second = (
        graph.placeholder(name) for name in ("ids", "embed", "first", "bias", "second")
    )
    x = graph.call_function(functional.embedding, (ids, embed, 0))
    x = graph.call_function(functional.linear, (x, first), {"bias": bias})
    x = graph.call_function(torch.relu, (x,))
    turned = graph.call_method("t", (second,))
    x = graph.call_function(torch.matmul, (x, turned))
    graph.output((graph.call_function(torch.nn.functional.linear, (x, embed)),))
    program = Program(fx.GraphModule(torch.nn.Module(), graph))
    named = {"embed": embed, "first": first, "second": second}
    program.weights = {node: f"{name}.weight" for name, node in named.items()}
    program.weights[bias] = "first.bias"
    floats = [catalogue()[f"{name}.weight"].dequantize() for name in named]
    generator = torch.Generator().manual_seed(1)
    inputs = [
        torch.tensor([[1, 0, 11], [2, 2, 5]]),
        *floats[:2],
        torch.randn(16, generator=generator),
        floats[2],
    ]
    Recorder(program.graph_module).run(*inputs)
    return program, inputs


def run(program: Program, inputs: list[torch.Tensor]) -> torch.Tensor:
    """What the program computes; handles are given the bytes they stand for."""
    owner = program.graph_module
    owner.recompile()
    kept = {}
    for weight in program.handles.values():
        for part, tensor in weight.load().parts.items():
            for node in owner.graph.find_nodes(op="get_attr"):
                name = str(node.target)
                if getattr(owner, name).is_meta and _stands_for(name, weight, part):
                    kept[name], owner._buffers[name] = getattr(owner, name), tensor
    try:
        return owner(*inputs)[0]  # type: ignore[no-any-return]
    finally:
        owner._buffers.update(kept)


def _stands_for(attribute: str, weight: WeightRef, part: str) -> bool:
    assert part in stored_parts(weight)
    return attribute == f"qc_handle_{weight.name.replace('.', '_')}_{part}"


def check_golden(name: str, texts: Mapping[str, str]) -> None:
    """Compare with ``golden/name.txt``; ``QCOMPILE_GOLDEN=write`` writes it."""
    found = "\n".join(f"**** {title} ****\n\n{text.strip()}\n" for title, text in texts.items())
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("QCOMPILE_GOLDEN") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(found, encoding="utf-8")
        pytest.skip(f"wrote {path.name}")
    assert found == path.read_text(encoding="utf-8")
