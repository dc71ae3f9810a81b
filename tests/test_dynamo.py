"""The contracts of dynamo that the JIT front end leans on."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from support.small import exact_copy, write_module
from torch import nn

import qcompile
from qcompile import backends, dynamo
from qcompile.errors import CaptureError, OptionError, SchemeError
from qcompile.kernel import Reject


class Block(nn.Module):
    """One linear of four identical layers."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.proj(x)) + x


def stack(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(Block() for _ in range(4)))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_module(tmp_path / "stack.gguf", stack(), {"1.proj.weight": "Q5_1"}, "Q8_0")


def test_layers_compiled_one_by_one_do_not_share_weights(tmp_path: Path) -> None:
    """Without identity guards dynamo would run the first layer's weights in all four."""
    torch._dynamo.reset()
    model: Any = stack()
    x = torch.randn(3, 64)
    expected: Any = None
    for index, block in enumerate(model):
        path = write_module(tmp_path / f"{index}.gguf", block, {}, "Q8_0")
        expected = exact_copy(path, Block())(x if expected is None else expected)
        options: Any = {"scheme": "gguf", "checkpoint": str(path), "emitter": "eager"}
        model[index] = torch.compile(block, backend="qcompile", options=options)
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("emitter", ["eager", "inductor", "chain"])
def test_backend_by_name(file: Path, emitter: str) -> None:
    torch._dynamo.reset()
    model = stack(seed=1)  # other weights than the file's: the file's must win
    options: Any = {"scheme": "gguf", "checkpoint": str(file), "device": "cpu", "emitter": emitter}
    compiled = torch.compile(model, backend="qcompile", options=options)
    x = torch.randn(3, 64)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), exact_copy(file, stack())(x), rtol=1e-5, atol=1e-5)


def test_optimize_sequential(file: Path) -> None:
    torch._dynamo.reset()
    model: Any = qcompile.optimize(stack(seed=1), scheme="gguf", checkpoint=file)
    for rows in (1, 2, 3, 5, 8, 13, 1):
        x = torch.randn(rows, 64)
        torch.testing.assert_close(model(x), exact_copy(file, stack())(x), rtol=1e-5, atol=1e-5)
    assert model.qcompile.compiles <= 2
    packed = model.qcompile._packed
    assert len(packed) == 4  # one copy for every weight, whatever the number of graphs


def test_two_models_of_one_class_keep_their_weights(tmp_path: Path) -> None:
    torch._dynamo.reset()
    x = torch.randn(2, 64)
    for seed in range(12):  # more than dynamo's limit of 8 graphs for one code object
        path = write_module(tmp_path / f"{seed}.gguf", stack(seed), {}, "Q4_0")
        model: Any = qcompile.optimize(stack(), scheme="gguf", checkpoint=path, emitter="eager")
        torch.testing.assert_close(model(x), exact_copy(path, stack())(x), rtol=1e-5, atol=1e-5)


def test_unknown_option_is_named(file: Path) -> None:
    torch._dynamo.reset()
    options: Any = {"scheme": "gguf", "checkpiont": str(file)}
    compiled = torch.compile(stack(), backend="qcompile", options=options)
    with pytest.raises(Exception, match=r"checkpiont.*\n.*needed[\s\S]*did you mean 'checkpoint'"):
        compiled(torch.randn(1, 64))


def test_a_quantized_weight_used_otherwise_is_an_error(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(64, 64, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.proj(x) + self.proj.weight.sum()
            return out

    torch.manual_seed(0)
    path = write_module(tmp_path / "odd.gguf", Odd(), {}, "Q8_0")
    torch._dynamo.reset()
    model: Any = qcompile.optimize(Odd(), scheme="gguf", checkpoint=path, emitter="eager")
    with pytest.raises(qcompile.CaptureError, match=r'proj.weight[\s\S]*on_unsupported="deq'):
        model(torch.randn(1, 64))
    torch._dynamo.reset()
    allowed: Any = qcompile.optimize(
        Odd(), scheme="gguf", checkpoint=path, emitter="eager", on_unsupported="dequantize"
    )
    x = torch.randn(1, 64)
    torch.testing.assert_close(allowed(x), exact_copy(path, Odd())(x), rtol=1e-4, atol=1e-4)


def test_stand_ins_have_no_storage_and_refuse_to_compute(file: Path) -> None:
    model: Any = qcompile.optimize(stack(), scheme="gguf", checkpoint=file)
    weight = model[0].proj.weight
    assert weight.untyped_storage().device.type == "meta"
    with pytest.raises(OptionError, match="it is a stand-in"):
        weight @ torch.ones(64)


def test_compiling_twice_is_refused(file: Path) -> None:
    model: Any = qcompile.optimize(stack(), scheme="gguf", checkpoint=file)
    with pytest.raises(OptionError, match="already compiled"):
        qcompile.optimize(model, scheme="gguf", checkpoint=file)


def test_a_failing_call_leaves_the_module_alone(file: Path) -> None:
    model = nn.Sequential(*(Block() for _ in range(3)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(SchemeError, match=r"3\.proj"):
        qcompile.optimize(model, scheme="gguf", checkpoint=file)
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert model(torch.randn(1, 64)).shape == (1, 64)


@pytest.mark.parametrize("emitter", ["eager", "chain"])
def test_a_parameter_that_is_replaced_or_written_is_seen(file: Path, emitter: str) -> None:
    """Also without the guards on tensors whose identity is guarded."""
    torch._dynamo.reset()
    model: Any = qcompile.optimize(stack(seed=1), checkpoint=file, emitter=emitter)
    exact: Any = exact_copy(file, stack())
    x = torch.randn(1, 64)
    close: Any = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(model(x), exact(x), **close)
    for changed in (model, exact):
        changed[2].proj.bias.data.fill_(3.0)
    torch.testing.assert_close(model(x), exact(x), **close)
    assert model.qcompile.compiles == 1
    for changed in (model, exact):
        changed[2].proj.bias = nn.Parameter(torch.full((64,), 5.0), requires_grad=False)
    torch.testing.assert_close(model(x), exact(x), **close)
    # A parameter in the place of a stand-in is another weight: it computes as it says.
    before, weight = model.qcompile.compiles, torch.randn(64, 64)
    for changed in (model, exact):
        changed[1].proj.weight = nn.Parameter(weight.clone(), requires_grad=False)
    torch.testing.assert_close(model(x), exact(x), **close)
    assert model.qcompile.compiles == before + 1


def test_only_guards_on_tensors_known_by_identity_go(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Any, list[bool]]] = []
    needed = dynamo._needed

    def noted(guards: Any) -> list[bool]:
        seen.append((guards, needed(guards)))
        return seen[-1][1]

    monkeypatch.setattr(dynamo, "_needed", noted)
    torch._dynamo.reset()
    model: Any = qcompile.optimize(stack(), checkpoint=file, emitter="eager")
    model(torch.randn(1, 64))
    [(guards, kept)] = seen
    known = {guard.name for guard in guards if guard.guard_type == "ID_MATCH"}
    gone = [guard for guard, keep in zip(guards, kept, strict=True) if not keep]
    assert len(gone) == 4  # the weights of the products
    assert {(guard.guard_type, guard.name in known) for guard in gone} == {("TENSOR_MATCH", True)}
    left = [g for g, keep in zip(guards, kept, strict=True) if keep]
    assert any(guard.guard_type == "TENSOR_MATCH" for guard in left)  # biases, and what is given


def test_keep_leaves_a_parameter_as_it_is(tmp_path: Path) -> None:
    torch._dynamo.reset()
    first, second = nn.Linear(64, 32), nn.Linear(32, 8)
    path = write_module(tmp_path / "part.gguf", nn.Sequential(first), {}, "Q8_0")
    model: Any = qcompile.optimize(
        nn.Sequential(nn.Linear(64, 32), second), "gguf", checkpoint=path, keep=[r"1\..*"]
    )
    x = torch.randn(3, 64)
    expected = second(exact_copy(path, nn.Sequential(nn.Linear(64, 32)))(x))
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)


def test_compiling_does_not_time_guards(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo would fill 32 MB to flush the caches, at the moment when memory is at its peak."""

    def refuse(*_: object) -> float:
        raise AssertionError("guards are timed")

    monkeypatch.setattr("torch._dynamo.guards.profile_guard_manager", refuse)
    torch._dynamo.reset()
    model: Any = qcompile.optimize(stack(), checkpoint=file, emitter="eager")
    assert model(torch.randn(3, 64)).shape == (3, 64)
    with pytest.raises(Exception, match="guards are timed"):  # the contract: dynamo itself does
        torch.compile(nn.Linear(3, 3), backend="eager")(torch.randn(2, 3))


class Branching(Block):
    """Chooses by a value."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.proj(x)
        if y.sum() > 0:
            return y
        return -y


class Opaque(Block):
    """Calls what cannot be traced."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


@pytest.mark.parametrize("kind", [Branching, Opaque])
def test_what_cannot_be_traced_is_named(tmp_path: Path, kind: type[Block]) -> None:
    torch._dynamo.reset()
    path = write_module(tmp_path / "m.gguf", kind(), {}, "Q8_0")
    model: Any = qcompile.optimize(kind(), checkpoint=path, emitter="eager")
    with pytest.raises(CaptureError) as caught:
        model(torch.randn(3, 64))
    error = caught.value
    assert "test_dynamo.py:" in error.where
    assert "in forward" in error.where
    assert kind.__name__ in error.needed
    assert error.reasons
    whole: Any = qcompile.optimize(kind(), checkpoint=path, emitter="eager", fullgraph=False)
    x = torch.randn(3, 64)
    torch.testing.assert_close(whole(x), exact_copy(path, kind())(x), rtol=1e-5, atol=1e-5)


class Sharing(nn.Module):
    """Two linears on one weight; the first adds a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.biased, self.plain = nn.Linear(64, 64), nn.Linear(64, 64, bias=False)
        self.plain.weight = self.biased.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.plain(torch.tanh(self.biased(x)))
        return y


@dataclasses.dataclass(frozen=True)
class Without:
    """A kernel that takes no biases."""

    kernel: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)

    def accepts(self, site: Any, target: Any) -> Any:
        taken = self.kernel.accepts(site, target)
        return Reject("no biases") if site.kind == "linear" and site.bias else taken


def test_uses_of_one_weight_with_and_without_a_bias(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    stored: Any = nn.Module()
    stored.biased = nn.Linear(64, 64)
    path = write_module(tmp_path / "m.gguf", stored, {}, "Q8_0")
    cpu: Any = backends.load("cpu")
    first = next(kernel for kernel in cpu.KERNELS if kernel.kind == "linear")
    other = dataclasses.replace(first, name="takes biases")
    monkeypatch.setattr(cpu, "KERNELS", (Without(first), other))
    model: Any = qcompile.optimize(Sharing(), checkpoint=path, emitter="eager")
    x = torch.randn(3, 64)
    found = model(x)
    chosen = {e.site.bias: e.kernel.name for e in model.qcompile.plan.entries}
    assert chosen == {False: first.name, True: other.name}
    assert {e.site.bias for e in model.qcompile.entries().values()} == {False, True}
    copy = Sharing()
    exact: Any = exact_copy(path, stored)
    copy.load_state_dict({**exact.state_dict(), "plain.weight": exact.biased.weight})
    torch.testing.assert_close(found, copy(x), rtol=1e-5, atol=1e-5)
