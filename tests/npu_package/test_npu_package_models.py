"""Whole checkpoints and models over the real torch_npu package, on its pretended device.

``.ci/npu`` makes the environment and runs these; elsewhere they are skipped.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.blocks import GatedMLP
from support.experts import folder_layers, write_experts
from support.folders import exact, rows
from support.gguf_exact import MXFP4, TYPES, small
from support.gguf_writer import write_model
from support.pack_compressed import Compressed, int_quantized
from support.pack_gptq import Gptq, gptq
from support.packers import Packed, write_folder
from support.zoo import ZOO, folder_entries, relative_l2
from torch import nn

import qcompile
from npu_package.device import LOG
from npu_package.ready import away, log  # noqa: F401 - a fixture
from qcompile.backends.npu.layouts import DTYPES
from qcompile.hf import build_skeleton
from qcompile.schemes.gguf.config import build_config
from qcompile.schemes.gguf.reader import GGUFFile

HALF = torch.float16


def zoo() -> list[tuple[str, Path]]:
    from support.zoo import entries

    found = {**entries("gguf", "dense"), **entries("gguf", "moe"), **folder_entries()}
    return [
        (name, entry.path) for name, entry in sorted(found.items()) if not entry.facts.get("part")
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "path"), zoo(), ids=[name for name, _ in zoo()])
def test_every_site_of_every_checkpoint(name: str, path: Path, dtype: torch.dtype) -> None:
    policy: Any = "dequantize"
    made = qcompile.load(path, device="npu", dtype=dtype, verify=True, on_unsupported=policy)[0]
    session: Any = made.qcompile
    assert str(session.plan.target) == "npu:910b"
    assert session.device.type == "npu"
    assert len(session.verification) == len(session.plan.entries)
    packed = [entry for entry in session.plan.entries if not entry.dequantize]
    linears = [entry for entry in packed if entry.site.kind == "linear"]
    assert LOG.calls.count("aclnnWeightQuantBatchMatmulV2") == len(linears)
    experts = [entry for entry in packed if entry.site.kind == "experts"]
    assert LOG.calls.count("aclnnMoeFinalizeRoutingV2") == len(experts)


def every_site_ran(made: Any) -> None:
    """All sites were compared on the device, and none was left to a policy."""
    session = made.qcompile
    assert len(session.verification) == len(session.plan.entries)
    assert all(entry.kernel is not None for entry in session.plan.entries)
    assert "aclnnGroupedMatmulV5" in LOG.calls or "aclnnGroupedMatmulV4" in LOG.calls


@pytest.mark.parametrize("name", ["gpt-oss", "qwen2moe", "deepseek3"])
def test_experts_of_every_kind(tmp_path: Path, name: str) -> None:
    """Tables, five and eight bits by groups, biases, a function that is no silu."""
    source = small(name)
    types = MXFP4 if name == "gpt-oss" else TYPES
    path = write_model(tmp_path / "m.gguf", name, source, types=types)
    skeleton = build_skeleton(build_config(GGUFFile.open(path)), HALF)
    made = qcompile.optimize(skeleton, checkpoint=path, device="npu", dtype=HALF, verify=True)
    every_site_ran(made)
    assert ("aclnnSwiGlu" in LOG.calls) == (name != "gpt-oss")


@pytest.mark.parametrize("bits", [4, 8])
def test_act_order_of_every_expert(tmp_path: Path, bits: int) -> None:
    what = Gptq(bits, 32, sym=False, order="permuted")
    source = small("qwen3moe", moe_intermediate_size=96)

    def pack(name: str, n: int, k: int, seed: int) -> Packed:
        return gptq(n, k, what, seed)

    folder = write_experts(tmp_path, source, folder_layers("qwen3moe", source, pack), what.config)
    every_site_ran(qcompile.load(folder, device="npu", dtype=HALF, verify=True)[0])
    assert {"aclnnSort", "aclnnGather"} <= set(LOG.calls)


def test_the_zoo_is_here() -> None:
    assert len(zoo()) == (24 if ZOO.exists() else 2)


@pytest.mark.parametrize("emitter", ["eager", "torchair", "npugraph_ex", "npugraphs"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_model_on_the_device(tmp_path: Path, emitter: str, dtype: torch.dtype) -> None:
    layers: dict[str, Packed] = {
        "0": gptq(64, 256, Gptq(4, 32, sym=False, order="permuted", bias=True)),
        "1": gptq(32, 64, Gptq(4, 32, bias=True)),
    }
    write_folder(tmp_path / "gptq", layers)

    def fresh() -> nn.Sequential:
        return nn.Sequential(nn.Linear(256, 64), nn.Linear(64, 32))

    made: Any = qcompile.optimize(
        fresh(), checkpoint=tmp_path / "gptq", device="npu", dtype=dtype, emitter=emitter
    )
    assert all(parameter.device.type == "npu" for parameter in made.parameters())
    expected = exact(fresh(), dict(layers))
    for shape in ((5, 256), (2, 3, 256), (7, 256), (5, 256)):
        x = torch.randn(shape)
        found = made(away(x.to(dtype)))
        assert found.device.type == "npu"
        assert relative_l2(found.cpu(), expected(x)) < (3e-3 if dtype == HALF else 2e-2)
    assert "aclnnWeightQuantBatchMatmulV2" in LOG.calls


class Listed(nn.Module):
    """A block whose routing is a list, because the device pretends no operators of routers."""

    ids: torch.Tensor
    shares: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([GatedMLP() for _ in range(4)])
        ids = torch.arange(64)[:, None] * torch.tensor([1, 3]) + torch.tensor([0, 1])
        self.register_buffer("ids", ids % 4)
        self.register_buffer("shares", torch.rand(64, 2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        x = hidden.flatten(0, -2)
        out, ids, shares = torch.zeros_like(x), self.ids[: len(x)], self.shares[: len(x)]
        for number, expert in enumerate(self.experts):
            token, place = torch.where(ids == number)
            out.index_add_(0, token, expert(x[token]) * shares[token, place, None])
        return out.view_as(hidden)


def listed(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    x = hidden.flatten(0, -2)
    found: torch.Tensor = self.experts(x, self.ids[: len(x)], self.shares[: len(x)])
    return found.view_as(hidden)


@pytest.mark.parametrize("emitter", ["eager", "torchair", "npugraph_ex", "npugraphs"])
def test_experts_on_the_device(tmp_path: Path, emitter: str) -> None:
    """Act-order and eight bits by groups: rows gathered, and inputs that come twice."""
    torch.manual_seed(0)
    qcompile.register_experts(Listed, listed)
    exact_model, layers = Listed(), dict[str, Packed]()
    for e, role in itertools.product(range(4), ("gate", "up", "down")):
        size = (64, 32) if role == "down" else (32, 64)
        what = Gptq(8 if role == "up" else 4, 32, sym=False, order="permuted")
        layers[f"experts.{e}.{role}_proj"] = gptq(*size, what, e)
    rules = {r"+:.*up_proj": {"bits": 8}}
    config = {**Gptq(4, 32, sym=False, order="permuted").config, "dynamic": rules}
    folder = write_folder(tmp_path, layers, config)
    made: Any = qcompile.optimize(
        Listed(), checkpoint=folder, device="npu", dtype=HALF, emitter=emitter
    )
    assert "gate int4, up int4x2, down int4" in made.qcompile.plan.explain("experts")
    made.shares.copy_(exact_model.shares)
    expected = exact(exact_model, dict(layers))
    for shape in ((5, 64), (2, 3, 64), (7, 64), (5, 64)):
        x = torch.randn(shape) / 8
        assert relative_l2(made(away(x.half())).cpu(), expected(x)) < 5e-3
    assert {"aclnnSort", "aclnnGather", "aclnnSwiGlu"} <= set(LOG.calls)


def test_int8_activations_on_the_device(tmp_path: Path) -> None:
    what = Compressed(8, -1, True, scale="BF16", bias=True, activations=True)
    layers: dict[str, Packed] = {"0": int_quantized(64, 256, what)}
    write_folder(tmp_path / "ct", layers)
    for dtype in DTYPES:
        made: Any = qcompile.optimize(
            nn.Sequential(nn.Linear(256, 64)),
            checkpoint=tmp_path / "ct",
            device="npu",
            dtype=dtype,
            verify=True,
        )
        found = made(away(rows(256).to(dtype)))
        expected = exact(nn.Sequential(nn.Linear(256, 64)), dict(layers))(rows(256))
        assert relative_l2(found.cpu(), expected) < 2e-2
    assert {"aclnnDynamicQuantV2", "aclnnQuantMatmulV5"} <= set(LOG.calls)


@pytest.mark.parametrize(
    ("name", "arch"),
    [("Ascend910B3", "910b"), ("Ascend910_9391", "910_93"), ("Ascend310P3", "310p")],
)
def test_devices_are_told_apart(name: str, arch: str) -> None:
    code = "from qcompile.backends import npu; print(npu.default_target(), npu.device())"
    environment = {**os.environ, "QC_FAKE_SOC": name}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[-2:] == [f"npu:{arch}", "npu"]
