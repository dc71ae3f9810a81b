"""Calibration: what reaches a linear, in which order, and what happens where nothing does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import qcompile
from qcompile.quantizers import settings_for
from qcompile.quantizers.calibrate import Work, calibrate
from qcompile.quantizers.inputs import Gram, Inputs, quiet
from qcompile.quantizers.linears import FloatLinear, Part, chosen_paths, float_linears

WIDTH = 64


class Layer(nn.Module):
    """Two linears on one input, one on their product; returns a tuple, as older layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 96), nn.Linear(WIDTH, 96)
        self.down = nn.Linear(96, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, hidden: torch.Tensor, shift: torch.Tensor) -> tuple[torch.Tensor, None]:
        x = self.norm(hidden + shift)
        return hidden + self.down(torch.relu(self.gate(x)) * self.up(x)), None


class Stack(nn.Module):
    """Layers with a linear before and one after them; every layer has a shift of its own."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, WIDTH), nn.Linear(WIDTH, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(count))

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self.first(x)
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, torch.full((WIDTH,), float(index)))[0]
        out: torch.Tensor = self.last(hidden)
        return out


class Detour(Stack):
    """The same, but for a step between layers that the layers do not see."""

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self.first(x)
        for index, layer in enumerate(self.layers):
            hidden = 0.5 * layer(hidden, torch.full((WIDTH,), float(index)))[0]
        out: torch.Tensor = self.last(hidden)
        return out


def make(kind: type[nn.Module] = Stack) -> nn.Module:
    torch.manual_seed(0)
    return kind().eval()


def batches(count: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 5, 16, generator=generator) for _ in range(count)]


def collect(model: nn.Module, data: Sequence[Any], scale: float = 1.0) -> dict[str, Gram]:
    """The inputs that calibration sees, when quantizing multiplies every weight by ``scale``."""
    linears = float_linears(model, chosen_paths(model, settings_for("rtn", {})))
    seen: dict[str, Gram] = {}
    finished: list[str] = []

    def quantize(linear: Part, gram: Inputs) -> None:
        assert isinstance(linear, FloatLinear)
        assert isinstance(gram, Gram)
        assert linear.name not in seen
        seen[linear.name] = gram
        linear.weight.data.mul_(scale)

    with quiet(model):
        calibrate(model, linears, data, Work(quantize, lambda linear: finished.append(linear.name)))
    assert sorted(finished) == sorted(seen) == sorted(linear.name for linear in linears)
    return seen


def inputs_of(model: nn.Module, data: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """``x.T x`` of every linear by plain hooks."""
    found: dict[str, torch.Tensor] = {}

    def hook(name: str, x: torch.Tensor) -> None:
        flat = x.flatten(0, -2)
        found[name] = found.get(name, 0) + flat.t() @ flat

    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            name = f"{path}.weight"
            module.register_forward_pre_hook(lambda _, args, name=name: hook(name, args[0]))
    with torch.no_grad():
        for batch in data:
            model(batch)
    return found


@pytest.mark.parametrize("kind", [Stack, Detour])
def test_every_linear_sees_its_inputs(kind: type[nn.Module]) -> None:
    seen, expected = collect(make(kind), batches()), inputs_of(make(kind), batches())
    assert set(seen) == set(expected)
    for name, gram in seen.items():
        assert gram.rows == 30
        assert gram.total is not None
        assert torch.allclose(gram.total, expected[name], rtol=1e-4, atol=1e-4), name


def test_layers_see_what_the_quantized_layers_before_them_give() -> None:
    seen = collect(make(), batches(), scale=0.5)
    model = make()
    changed: Any = model
    with torch.no_grad():
        for index in range(3):
            for name in ("gate", "up", "down"):
                getattr(changed.layers[index], name).weight.mul_(0.5)
    expected = inputs_of(model, batches())
    for name in ("layers.2.gate.weight", "layers.2.down.weight", "layers.1.up.weight"):
        total = seen[name].total
        assert total is not None
        assert torch.allclose(total, expected[name], rtol=1e-4, atol=1e-4), name
    last = seen["last.weight"].total
    assert last is not None
    assert torch.allclose(last, expected["last.weight"], rtol=1e-4, atol=1e-4)


def test_linears_on_one_input_share_its_sum() -> None:
    seen = collect(make(), batches())
    assert seen["layers.0.gate.weight"] is seen["layers.0.up.weight"]
    assert seen["layers.0.gate.weight"] is not seen["layers.0.down.weight"]


def test_padding_is_not_counted() -> None:
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    batch = batches(1)[0]
    padded = batch.clone()
    padded[0, 3:] = 1e3
    masked = collect(make(), [{"x": padded, "attention_mask": mask}])
    name = "layers.0.gate.weight"
    assert masked[name].rows == 8
    total = masked[name].total
    assert total is not None
    assert total.abs().max() < 1e3
    lost = inputs_of(make(), [batch[0:1, :3]])[name] + inputs_of(make(), [batch[1:]])[name]
    assert torch.allclose(total, lost, rtol=1e-4, atol=1e-4)


def test_training_mode_cache_and_hooks_are_as_before() -> None:
    model = make().train()
    model.layers[1].eval()  # type: ignore[index, union-attr]
    before = [module.training for module in model.modules()]
    collect(model, batches())
    assert [module.training for module in model.modules()] == before
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert not any("forward" in module.__dict__ for module in model.modules())


class Experts(nn.Module):
    """Four experts behind a router that chooses by the sign of two columns; ``never`` avoids 3."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 32)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.router(x).argmax(-1)
        out = x.new_zeros((*x.shape[:-1], 32))
        for index, expert in enumerate(self.experts):
            here = torch.nonzero(chosen == index).flatten()
            if len(here):
                out = out.index_put((here,), expert(x[here]))
        return out


def test_an_expert_without_calibration_data_is_rounded_and_named() -> None:
    torch.manual_seed(0)
    model = Experts().eval()
    with torch.no_grad():
        assert model.router.bias is not None
        model.router.bias[3] = -100
    expert = model.experts[3][0].weight.detach().clone()  # type: ignore[index]
    data = [torch.randn(200, 16, generator=torch.Generator().manual_seed(2))]
    with pytest.warns(UserWarning, match=r"no calibration data reached 1 linears.*experts\.3\.0"):
        qcompile.optimize(
            model, scheme="gptq", group_size=16, calibration=data, emitter="eager", skip=["router"]
        )
    session: Any = model.qcompile
    notes = "\n".join(session.plan.notes)
    assert "rounded to nearest, no calibration data reached experts.3.0.weight" in notes
    assert "left in float: router.weight" in notes
    rounded = session.catalogue["experts.3.0.weight"].dequantize()
    assert torch.isfinite(rounded).all()
    assert (rounded - expert).abs().max() < expert.abs().max() / 7
    # Run by itself: routing depends on data, which a graph cannot follow.
    out = torch.nn.functional.linear(data[0], rounded)
    assert torch.isfinite(out).all()


def test_gptq_without_data_says_that_it_rounds() -> None:
    torch.manual_seed(0)
    model, plain = nn.Sequential(nn.Linear(64, 32)), nn.Sequential(nn.Linear(64, 32))
    plain.load_state_dict(model.state_dict())
    with pytest.warns(UserWarning, match="no calibration data: weights are rounded to nearest"):
        qcompile.optimize(model, scheme="gptq", emitter="eager")
    qcompile.optimize(plain, scheme="rtn", emitter="eager", sym=True, search=False)
    first: Any = model.qcompile
    second: Any = plain.qcompile
    assert "gptq rounds to nearest" in first.plan.notes[0]
    name = "0.weight"
    assert torch.equal(first.catalogue[name].dequantize(), second.catalogue[name].dequantize())


def test_data_that_the_model_refuses_leaves_it_as_it_was() -> None:
    model = make()
    before = [(p, p.clone()) for p in model.parameters()]
    with pytest.raises(RuntimeError):
        qcompile.optimize(model, scheme="gptq", calibration=[torch.zeros(2, 5, 17)])
    for now, (parameter, values) in zip(model.parameters(), before, strict=True):
        assert now is parameter
        assert torch.equal(now, values)
    assert not hasattr(model, "qcompile")
