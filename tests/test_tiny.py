"""The smoke test: one small model through every stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.small import exact_copy, write_module
from support.zoo import relative_l2
from torch import nn
from torch.nn import functional

import qcompile
from qcompile import backends
from qcompile.errors import PlanError, SchemeError

TYPES = ("BF16", "Q5_1", "TQ1_0")  # the others: mixed below
IDS = torch.tensor([[1, 5, 0, 63, 5], [2, 2, 40, 7, 9]])


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(256)
        self.up = nn.Linear(256, 512)
        self.down = nn.Linear(512, 256, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return out


class Tiny(nn.Module):
    """An embedding, two layers, a head that is the embedding again."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 256)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return functional.linear(x, self.embed.weight)


class Tied(Tiny):
    """The same with the head as a module of its own that shares the parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(256, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(x)
        return out


def tiny(seed: int = 0) -> Tiny:
    torch.manual_seed(seed)
    return Tiny()


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with five types in one model."""
    types = {
        "embed.weight": "Q8_0",
        "layers.0.up.weight": "Q4_1",
        "layers.1.up.weight": "Q5_0",
        "layers.1.down.weight": "F16",
    }
    return write_module(tmp_path_factory.mktemp("tiny") / "mixed.gguf", tiny(), types, "Q4_0")


def check(path: Path, **options: Any) -> Any:
    torch._dynamo.reset()
    model: Any = qcompile.optimize(tiny(seed=1), checkpoint=path, verify=True, **options)
    expected = exact_copy(path, tiny(seed=2))(IDS)
    found = model(IDS)
    assert relative_l2(found, expected) < 1e-5
    return model


@pytest.mark.parametrize("type", TYPES)
def test_a_type(tmp_path: Path, type: str) -> None:
    check(write_module(tmp_path / f"{type}.gguf", tiny(), {}, type), emitter="eager")


@pytest.mark.parametrize("emitter", ["eager", "inductor", "chain"])
def test_types_in_one_file(mixed: Path, emitter: str) -> None:
    model = check(mixed, emitter=emitter)
    assert len(model.qcompile.plan.entries) == 5  # the head shows only in the graph
    assert model.qcompile.verification[0].relative_l2 < 1e-5
    assert model.layers[1].down.weight.dtype is torch.float32
    for ids in (IDS[:1], IDS[:, :1]) if emitter == "eager" else (IDS[:, :4],):
        expected = exact_copy(mixed, tiny())(ids)
        torch.testing.assert_close(model(ids), expected, rtol=1e-4, atol=1e-4)
    assert len(model.qcompile._packed) == 4  # one copy for each weight, whatever uses it


def test_reduced_precision(mixed: Path) -> None:
    torch._dynamo.reset()
    model: Any = qcompile.optimize(
        tiny(), checkpoint=mixed, dtype=torch.bfloat16, emitter="eager", verify=True
    )
    logits = model(IDS)
    assert logits.dtype is torch.bfloat16
    assert relative_l2(logits, exact_copy(mixed, tiny())(IDS)) < 3e-2


def test_a_parameter_with_two_names(mixed: Path) -> None:
    torch._dynamo.reset()
    model: Any = qcompile.optimize(Tied(), checkpoint=mixed, emitter="eager")
    assert relative_l2(model(IDS), exact_copy(mixed, tiny())(IDS)) < 1e-5


def test_a_plan_for_a_device_that_is_not_here(mixed: Path) -> None:
    plan = qcompile.plan(tiny(), device="cuda:sm90", checkpoint=mixed)
    assert "target cuda:sm90" in str(plan)
    assert not plan.refused
    names = {entry.kernel.name for entry in plan.entries if entry.kernel}
    assert names == {"cuda.triton_linear", "cuda.triton_embedding"}
    assert "package humming-kernels is not installed" in plan.explain(plan.entries[1].site.name)


def test_a_device_that_takes_nothing(mixed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device, model = "cuda:sm90", tiny()
    monkeypatch.setattr(backends.load("cuda"), "kernels", lambda dtype: ())
    plan = qcompile.plan(model, device=device, checkpoint=mixed)
    assert len(plan.refused) == len(plan.entries) == 4
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(PlanError, match=r'4 of 4 sites[\s\S]*on_unsupported="dequantize"'):
        qcompile.optimize(model, device=device, checkpoint=mixed)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    planned = qcompile.plan(model, device=device, checkpoint=mixed, on_unsupported="dequantize")
    assert not planned.refused
    assert planned.bytes_after == 2 * (64 * 256 + 3 * 256 * 512)  # bfloat16


def test_a_tensor_that_is_missing_is_named(mixed: Path) -> None:
    bigger: Any = tiny()
    bigger.extra = nn.Linear(8, 8)
    with pytest.raises(SchemeError, match=r"missing in the checkpoint: extra\.weight, extra\.bias"):
        qcompile.optimize(bigger, checkpoint=mixed)
    with pytest.raises(SchemeError, match="architecture 'plain' is not supported"):
        qcompile.optimize(nn.Linear(8, 8), checkpoint=mixed)  # no name in common
