"""Checkpoints that other tools wrote, for CUDA devices: plans, and first layers interpreted."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.zoo_slices import WHOLE, found_entries

import qcompile
from qcompile.backends import cuda
from qcompile.backends.cuda import installed

TESTS = Path(__file__).parents[1]
# About as much work each.
JOBS = (
    ("gguf-iq4_xs", "gguf-mxfp4-mixed", "gguf-potpourri", "gguf-q2_k", "gguf-q4_k_m"),
    (
        "gptq-w2-g32-asym",
        "gptq-w4-chan-asym",
        "gptq-w4-g128-dynamic-mixed",
        "gptq-w4-g128-lmhead",
        "gptq-w4-g128-sym",
        "gptq-w4-g32-asym-actorder",
        "gptq-w8-chan-sym",
        "gptqv2-w2-g64-sym-actorder",
    ),
    (
        "awq-gemm-w4-g128",
        "ar-w2g32-asym",
        "ar-w4g128-asym-autoawq",
        "ar-w4g128-sym-autogptq",
        "ct-fp8-dynamic",
        "ct-mxfp4a16",
        "ct-nvfp4a16",
        "ct-w4a16-g128-sym",
    ),
    ("moe-gguf-q4_k_m", "moe-gptq-w4-g128-sym", "moe-ct-w4a16-g128-sym"),
)
NAMES = [name for job in JOBS for name in job]
# The largest relative L2 error of logits in float16.
BOUND = 2e-3
# Groups of 8 are what no matrix unit takes: the one weight of that type.
REFUSED = {"gguf-potpourri": ("model.layers.2.self_attn.o_proj", "groups of 8 columns")}
# Linears of a slice: seven in a layer, four beside experts; those that differ from this.
LINEARS = {"gptq-w4-g128-dynamic-mixed": 24, "gptq-w4-g128-lmhead": 8, "gguf-potpourri": 26}
# What a refusal quotes: the type, the group, or the package that is missing.
RULES = {
    "cuda.marlin4": ("no edge leads from ", "the group must be ", " not installed: the kernel"),
    "cuda.marlin8": ("no edge leads from ", "the group must be ", " not installed: the kernel"),
    "cuda.marlin_experts": ("no edge leads from ", " not installed: the kernel calls _moe_C::"),
    "cuda.humming": ("package humming-kernels is ",),
    "cuda.triton_linear": ("groups of 8 columns; a matrix unit takes 16",),
}


def entry_of(name: str) -> Any:
    found = found_entries().get(name)
    if found is None:
        pytest.skip(f"{name} needs the checkpoint zoo at ../shared/zoo")
    return found


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans as on a machine without the optional packages, whatever this one has."""
    monkeypatch.setattr(installed, "_is_installed", lambda module: False)
    monkeypatch.setattr(installed, "_registered", lambda operator: None)


def test_every_checkpoint_is_in_a_job() -> None:
    assert set(found_entries()) <= set(NAMES)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job[0])
def test_a_layer_of_each_in_float16(job: tuple[str, ...]) -> None:
    names = [name for name in job if name in found_entries()]
    if not names:
        pytest.skip(f"{', '.join(job)} need the checkpoint zoo at ../shared/zoo")
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)}
    command = [sys.executable, "-m", "support.zoo_slices", *names]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-6000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["name"] for row in rows] == names
    for row in rows:
        name, kernels = row["name"], row["kernels"]
        assert row["error"] < BOUND, row
        assert row["floats"] == (name in REFUSED), row
        assert row["layers"] == (4 if name in WHOLE else 1)
        expected = {"cuda.triton_linear": LINEARS.get(name, 7)}
        if "gguf" in name:
            expected["cuda.triton_embedding"] = 1
            expected["cuda.triton_linear"] += name not in LINEARS  # the head
        if name.startswith("moe"):
            expected["cuda.triton_linear"] -= 3
            expected["cuda.triton_experts"] = 1
        assert kernels == expected, row


@pytest.mark.usefixtures("nothing_installed")
@pytest.mark.parametrize("device", ["cuda:sm80", "cuda:sm90"])
@pytest.mark.parametrize("name", NAMES)
def test_a_plan_has_a_reason_for_every_kernel(name: str, device: str) -> None:
    plan = qcompile.plan(entry_of(name).path, device, dtype=torch.float16)
    refused = REFUSED.get(name)
    assert [e.site.name for e in plan.entries if e.kernel is None] == (
        [refused[0]] if refused else []
    )
    for entry in plan.entries:
        asked = [kernel.name for kernel in cuda.KERNELS if kernel.kind == entry.site.kind]
        assert [verdict.kernel for verdict in entry.verdicts] == asked
        said = plan.explain(entry.site.name)
        for verdict in entry.verdicts:
            assert verdict.text in said
            if verdict.cost is None:
                assert any(rule in verdict.text for rule in RULES[verdict.kernel]), verdict.text
        if entry.kernel is not None:
            assert entry.kernel.name == f"cuda.triton_{entry.site.kind}"
            assert f"[x] {entry.kernel.name}" in said
        else:
            assert refused is not None
            assert refused[1] in said


@pytest.mark.usefixtures("nothing_installed")
def test_reasons_quote_the_rule_that_is_broken() -> None:
    """One of every sort, word by word."""
    for name, site, text in (
        (
            "gptq-w2-g32-asym",
            "model.layers.0.mlp.up_proj",
            "packages vllm, sgl-kernel and gptqmodel",
        ),
        ("gguf-q4_k_m", "model.layers.0.mlp.up_proj", "no edge leads from gguf.q4_k (q4_k) to "),
        ("moe-gptq-w4-g128-sym", "model.layers.0.mlp.experts", "package vllm is not installed"),
        ("moe-gguf-q4_k_m", "model.layers.0.mlp.experts", "gate 4 bits, up 4 bits, down 4 bits"),
    ):
        plan = qcompile.plan(entry_of(name).path, "cuda:sm90", dtype=torch.float16)
        assert text in plan.explain(site), plan.explain(site)
