"""Blocks that loop over their experts, described by their users."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.blocks import (
    EXPERTS,
    HIDDEN,
    INNER,
    Looping,
    Sorting,
    Stack,
    without_loop,
    without_sorting,
)
from support.pack_gptq import Gptq, gptq
from support.packers import Packed, write_folder
from support.zoo import relative_l2
from torch import nn

import qcompile
from qcompile import register
from qcompile.errors import CaptureError, OptionError, SchemeError
from qcompile.site import ExpertsSite

LINEARS = {
    Looping: {"w1": (INNER, HIDDEN), "w3": (INNER, HIDDEN), "w2": (HIDDEN, INNER)},
    Sorting: {
        "gate_proj": (INNER, HIDDEN),
        "up_proj": (INNER, HIDDEN),
        "down_proj": (HIDDEN, INNER),
    },
}


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    before = dict(register._KNOWN)
    qcompile.register_experts(Looping, without_loop, gate="w1", up="w3", down="w2")
    qcompile.register_experts(Sorting, without_sorting)
    yield
    register._KNOWN.clear()
    register._KNOWN.update(before)


def _x(tokens: int) -> torch.Tensor:
    return torch.randn(1, tokens, HIDDEN, generator=torch.Generator().manual_seed(tokens))


def _folder(
    path: Path, model: nn.Module, block: type[nn.Module], bias: bool = False
) -> tuple[Path, dict[str, Any]]:
    """A GPTQ folder of the experts; the model gets the exact values."""
    layers: dict[str, Any] = {}
    state: dict[str, torch.Tensor] = {}
    for n in range(2):
        for e in range(EXPERTS):
            for place, (name, (rows, columns)) in enumerate(LINEARS[block].items()):
                full = f"layers.{n}.experts.{e}.{name}"
                packed = gptq(rows, columns, Gptq(4, 32, bias=bias), 100 * n + 10 * e + place)
                layers[full] = packed
                state[f"{full}.weight"] = packed.exact
                if bias:
                    state[f"{full}.bias"] = packed.tensors["bias"].float()
    model.load_state_dict(state, strict=False)
    layers |= {n: p.detach() for n, p in model.named_parameters() if ".experts." not in n}
    return write_folder(path, layers), layers


def _optimized(folder: Path | None, model: nn.Module, **options: Any) -> Any:
    torch._dynamo.reset()
    settings = {"emitter": "eager", "verify": folder is not None, **options}
    return qcompile.optimize(model, checkpoint=folder, **settings)


def _sites(model: Any) -> list[str]:
    return [e.site.name for e in model.qcompile.plan.entries if isinstance(e.site, ExpertsSite)]


@pytest.mark.parametrize("block", [Looping, Sorting])
def test_a_folder_of_single_experts(block: type[nn.Module], tmp_path: Path) -> None:
    exact = Stack(block).eval()
    folder, _ = _folder(tmp_path, exact, block)
    model = _optimized(folder, Stack(block).eval())
    assert _sites(model) == ["layers.0.experts", "layers.1.experts"]
    for tokens in (1, 7, 200):
        with torch.no_grad():
            expected = exact(_x(tokens))
        assert relative_l2(model(_x(tokens)), expected) < 1e-5
    # One graph for a single token, one for any number; no graph breaks.
    assert model.qcompile.compiles <= 2


def test_experts_with_biases(tmp_path: Path) -> None:
    exact = Stack(Looping, bias=True).eval()
    folder, _ = _folder(tmp_path, exact, Looping, bias=True)
    model = _optimized(folder, Stack(Looping, bias=True).eval())
    with torch.no_grad():
        assert relative_l2(model(_x(7)), exact(_x(7))) < 1e-5


def test_parameters_may_be_on_the_meta_device(tmp_path: Path) -> None:
    exact = Stack(Sorting).eval()
    folder, _ = _folder(tmp_path, exact, Sorting)
    with torch.device("meta"):
        empty = Stack(Sorting).eval()
    model = _optimized(folder, empty)
    with torch.no_grad():
        assert relative_l2(model(_x(7)), exact(_x(7))) < 1e-5


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    _, layers = _folder(tmp_path / "whole", Stack(Looping), Looping)
    assert isinstance(layers.pop("layers.1.experts.3.w2"), Packed)
    folder = write_folder(tmp_path / "part", layers)
    model = Stack(Looping).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(SchemeError, match=r"layers\.1\.experts[\s\S]*no down matrix of expert 3"):
        _optimized(folder, model)
    # The model is as it was: its names, its values, its loop.
    after = model.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert "forward" not in model.layers[0].__dict__
    assert isinstance(model.layers[0].experts, nn.ModuleList)


def test_linears_of_any_name(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(HIDDEN, INNER), nn.Linear(INNER, HIDDEN)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.right(nn.functional.relu(self.left(x)))
            return result

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(HIDDEN, EXPERTS)
            self.parts = nn.ModuleList([Odd() for _ in range(EXPERTS)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            share, chosen = self.router(x).softmax(-1).max(-1)
            out = torch.zeros_like(x)
            for number, part in enumerate(self.parts):
                mine = chosen == number
                out[mine] = part(x[mine]) * share[mine][:, None]
            return out

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, -2)
        share, chosen = self.router(flat).softmax(-1).topk(1, -1)
        result: torch.Tensor = self.parts(flat, chosen, share).view_as(x)
        return result

    qcompile.register_experts(Block, forward, experts="parts", gate=None, up="left", down="right")
    exact = Stack(Block).eval()
    layers: dict[str, Any] = {}
    state: dict[str, torch.Tensor] = {}
    for n in range(2):
        for e in range(EXPERTS):
            for name, rows, columns in (("left", INNER, HIDDEN), ("right", HIDDEN, INNER)):
                full = f"layers.{n}.parts.{e}.{name}"
                packed = gptq(rows, columns, Gptq(4, 32, bias=True), 10 * e + n)
                layers[full] = packed
                state |= {f"{full}.weight": packed.exact}
                state |= {f"{full}.bias": packed.tensors["bias"].float()}
    exact.load_state_dict(state, strict=False)
    layers |= {n: p.detach() for n, p in exact.named_parameters() if ".parts." not in n}
    model = _optimized(write_folder(tmp_path, layers), Stack(Block).eval())
    with torch.no_grad():
        assert relative_l2(model(_x(7)), exact(_x(7))) < 1e-5
    assert _sites(model) == ["layers.0.parts", "layers.1.parts"]


def test_a_plan_shows_the_sites_and_leaves_the_model(tmp_path: Path) -> None:
    model: Any = Stack(Looping).eval()
    folder, _ = _folder(tmp_path, Stack(Looping), Looping)
    before = {name: value.data_ptr() for name, value in model.named_parameters()}
    plan = qcompile.plan(model, checkpoint=folder)
    names = [e.site.name for e in plan.entries if isinstance(e.site, ExpertsSite)]
    assert names == ["layers.0.experts", "layers.1.experts"]
    assert before == {name: value.data_ptr() for name, value in model.named_parameters()}
    assert "forward" not in model.layers[0].__dict__


# **** what is refused ****


def test_another_routing_is_refused(tmp_path: Path) -> None:
    def wrong(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        x = hidden.view(-1, hidden.shape[-1])
        ids, weights = self.route(x)
        y: torch.Tensor = self.experts(x, ids, weights / 1.5).view_as(hidden)
        return torch.add(y, self.shared_experts(hidden))

    qcompile.register_experts(Sorting, wrong)
    folder, _ = _folder(tmp_path, Stack(Sorting), Sorting)
    model = Stack(Sorting).eval()
    with pytest.raises(CaptureError, match=r"layers\.0[\s\S]*registered forward of Sorting"):
        _optimized(folder, model)
    assert isinstance(model.layers[0].experts, nn.ModuleList)
    assert torch.isfinite(model(_x(3))).all()


def test_exchanged_gate_and_up_are_refused(tmp_path: Path) -> None:
    qcompile.register_experts(Looping, without_loop, gate="w3", up="w1", down="w2")
    folder, _ = _folder(tmp_path, Stack(Looping), Looping)
    with pytest.raises(CaptureError, match="computes something else between its products"):
        _optimized(folder, Stack(Looping).eval())


def test_names_that_are_not_there_are_refused(tmp_path: Path) -> None:
    qcompile.register_experts(Looping, without_loop, gate="w4", up="w3", down="w2")
    folder, _ = _folder(tmp_path, Stack(Looping), Looping)
    with pytest.raises(CaptureError, match="no linear w4"):
        _optimized(folder, Stack(Looping).eval())


def test_an_unknown_activation_is_refused(tmp_path: Path) -> None:
    model: Any = Stack(Looping).eval()
    for layer in model.layers:
        for expert in layer.experts:
            expert.act_fn = nn.Softplus()
    folder, _ = _folder(tmp_path, Stack(Looping), Looping)
    with pytest.raises(CaptureError, match="computes something else"):
        _optimized(folder, model)


def test_experts_that_differ_are_refused(tmp_path: Path) -> None:
    model: Any = Stack(Looping).eval()
    model.layers[1].experts[2].w1 = nn.Linear(HIDDEN, 2 * INNER, bias=False)
    model.layers[1].experts[2].w3 = nn.Linear(HIDDEN, 2 * INNER, bias=False)
    model.layers[1].experts[2].w2 = nn.Linear(2 * INNER, HIDDEN, bias=False)
    folder, _ = _folder(tmp_path, Stack(Looping), Looping)
    with pytest.raises(CaptureError, match="differs in shape"):
        _optimized(folder, model)
    # The first layer, which was fine, is put back too.
    assert isinstance(model.layers[0].experts, nn.ModuleList)


def test_what_is_registered_is_checked() -> None:
    wrong: Any = 3
    with pytest.raises(OptionError, match=r"subclass of nn\.Module"):
        qcompile.register_experts(wrong, without_loop)
    with pytest.raises(OptionError, match="a function"):
        qcompile.register_experts(Looping, wrong)
