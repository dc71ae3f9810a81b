"""Whole mixtures of experts on the Ascend backend, in every architecture, under emulation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import gguf_mixtures
from support.experts import folder_layers, write_experts
from support.gguf_exact import MXFP4, TYPES, exact, ids_of, load, small
from support.gguf_writer import write_model
from support.pack_gptq import Gptq, gptq
from support.packers import Packed
from support.zoo import relative_l2
from torch import nn

import qcompile
from qcompile.hf import build_skeleton
from qcompile.schemes.gguf.config import build_config
from qcompile.schemes.gguf.reader import GGUFFile

DEVICE = "npu:910b"


def check(made: Any, expected: nn.Module, bound: float, *lengths: int) -> Any:
    """Compare with the exact model; nothing may be left to a policy."""
    for length in lengths:
        ids = ids_of(length)
        with torch.no_grad():
            exact_logits = expected(ids).logits
        found = made(ids).logits
        assert found.dtype == made.qcompile.dtype
        assert relative_l2(found, exact_logits) < bound
    plan = made.qcompile.plan
    assert all(entry.kernel is not None for entry in plan.entries)
    experts = [entry for entry in plan.entries if entry.site.kind == "experts"]
    assert {entry.runs_as for entry in experts} == {"npu.experts"}
    return made


def stored(name: str, folder: Path) -> tuple[Path, nn.Module]:
    """A file of an architecture, and the exact model."""
    source = small(name)
    types = MXFP4 if name == "gpt-oss" else TYPES
    path = write_model(folder / "m.gguf", name, source, types=types)
    return path, exact(name, source, types)


@pytest.mark.parametrize("name", gguf_mixtures.CONFIGS)
def test_every_architecture_without_rounding(name: str, tmp_path: Path) -> None:
    """Four, five and eight bits by groups, tables, biases, and functions other than silu."""
    path, expected = stored(name, tmp_path)
    check(load(path, device=DEVICE, emulate="float32"), expected, 1e-3, 7, 64)


@pytest.mark.parametrize("name", ["gpt-oss"])
def test_an_architecture_in_float16(name: str, tmp_path: Path) -> None:
    path, expected = stored(name, tmp_path)
    torch._dynamo.reset()
    made: Any = qcompile.optimize(
        build_skeleton(build_config(GGUFFile.open(path)), torch.float16),
        checkpoint=path,
        device=DEVICE,
        dtype=torch.float16,
        emulate=True,
        verify=True,
    )
    check(made, expected, 5e-3, 1, 64)


@pytest.mark.parametrize(("name", "bits"), [("qwen3moe", 4), ("qwen3moe", 8), ("gpt-oss", 4)])
def test_act_order_in_every_expert(name: str, bits: int, tmp_path: Path) -> None:
    """Each matrix of each expert has an order of its own."""
    what = Gptq(bits, 32, sym=False, order="permuted")
    size = "intermediate_size" if name == "gpt-oss" else "moe_intermediate_size"
    source = small(name, **{size: 96})

    def pack(full: str, n: int, k: int, seed: int) -> Packed:
        bias = "experts" in full and "gpt" in full
        return gptq(n, k, Gptq(bits, 32, sym=False, order="permuted", bias=bias), seed)

    folder = write_experts(tmp_path, source, folder_layers(name, source, pack), what.config)
    torch._dynamo.reset()
    compiled: Any = qcompile.load(folder, device=DEVICE, emulate="float32", verify=True)[0]
    made = check(compiled, source, 1e-3, 7, 64)
    [first, *_] = [e for e in made.qcompile.plan.entries if e.site.kind == "experts"]
    assert "in each expert's order (act-order)" in made.qcompile.plan.explain(first.site.name)
    packed = made.qcompile.packed(first).parts
    [columns, *_] = [part for part_name, part in packed.items() if part_name.endswith("columns")]
    assert not torch.equal(columns[0], columns[1])
