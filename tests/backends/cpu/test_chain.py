"""The emitter ``chain``: which graphs it takes, and that what it runs is what eager runs."""

from __future__ import annotations

import functools
import gc
import re
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.small import exact_copy, write_module
from torch import nn
from torch._dynamo.utils import counters
from torch._guards import TracingContext

import qcompile
from qcompile.backends.cpu import build, chain
from qcompile.backends.cpu.probe import find_compiler
from qcompile.backends.cpu.shims import declarations
from qcompile.errors import LowerError

pytestmark = pytest.mark.skipif(not find_compiler(), reason="no C++ compiler")
X = torch.linspace(-1, 1, 64)[None]
Ran = list[tuple[chain.Chain, tuple[Any, ...]]]


class Layer(nn.Module):
    """A product."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.relu(self.proj(x)) + x
        return y


class Literal(Layer):
    """Makes a tensor of literals, which the code gets as a further input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.proj(x) + x * torch.tensor([1.0, 2.0, 3.0, 4.0] * 16)
        return y


class Reading(nn.Module):
    """Reads results several times, also at the end; returns an input, and results twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = self.layers[0](x)
        second = self.layers[1](first * first)
        third = self.layers[2](first + second)
        last = self.layers[3](first + third) + second
        return last, x, first, third, first


class Viewing(Reading):
    """A layer's result is a view of what the graph is given."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = []
        for layer in self.layers:
            found.append(layer.proj(x[:, None])[:, 0])
            x = x.view(x.shape)
        return (*found, x.t())


class Cached(nn.Module):
    """Layers that write to a cache of any length; gives the next length."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(Layer() for _ in range(4))

    def forward(
        self, x: torch.Tensor, caches: list[torch.Tensor], place: torch.Tensor
    ) -> tuple[torch.Tensor, int]:
        for layer, cache in zip(self.layers, caches, strict=True):
            cache.index_copy_(1, place, layer(x))
            x = x + torch.tanh(cache.sum(1, keepdim=True)) * cache.shape[1]
        return x, caches[0].shape[1] + 1


class Asking(nn.Module):
    """Looks a second embedding up in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(Layer() for _ in range(4))
        self.embed, self.second = nn.Embedding(64, 64), nn.Embedding(32, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embed(ids)
        for layer in self.layers:
            x = layer(x) + layer.proj(self.second(ids))
        return x


def stack(kind: type[Layer] = Layer) -> nn.Module:
    return nn.Sequential(*(kind() for _ in range(4)))


def compiled(make: Callable[[], nn.Module], emitter: str) -> Any:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make().eval()
    return qcompile.optimize(model, scheme="rtn", bits=8, group_size=32, emitter=emitter)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Ran:
    """The chain of every call that runs as one, and what it is given."""
    seen: Ran = []
    call = chain.Chain.__call__

    def noted(self: chain.Chain, *given: Any) -> tuple[Any, ...]:
        seen.append((self, given))
        return call(self, *given)

    monkeypatch.setattr(chain.Chain, "__call__", noted)
    return seen


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_declarations_are_the_definitions() -> None:
    text = Path(build.__file__).with_name("csrc").joinpath("shims.cpp").read_text(encoding="utf-8")
    defined = re.findall(r"AOTITorchError aoti_torch_cpu_\w+\([^)]*\)", text)
    declared = [line for lines in declarations().values() for line in lines]
    flat = [" ".join(one.split()).replace("( ", "(") for one in defined]
    assert sorted(flat) == sorted(declared)


def test_layers_of_one_row_are_one_call(ran: Ran) -> None:
    expected = compiled(stack, "inductor")(X)
    assert not ran
    model = compiled(stack, "chain")
    for _ in range(3):
        close(model(X), expected)
    assert len(ran) == 3
    assert ran[0][0] is ran[2][0]
    with torch.inference_mode():
        close(model(X), expected)
    model(torch.randn(70, 64))
    assert len(ran) == 4  # rows that are many, or any number, run as under the emitter inductor


def test_results_are_read_as_often_as_the_graph_reads_them(ran: Ran) -> None:
    expected, model = compiled(Reading, "eager")(X), compiled(Reading, "chain")
    for _ in range(2):
        found = model(X)
        close(found, expected)
        assert found[1] is X
        assert found[2] is found[4]
    assert len(ran) == 2


@pytest.mark.parametrize("make", [Viewing, functools.partial(stack, Literal)])
def test_what_is_not_plain_runs_apart(make: Callable[[], nn.Module], ran: Ran) -> None:
    expected = compiled(make, "eager")(X)
    close(compiled(make, "chain")(X), expected)
    assert not ran


def test_caches_are_written_in_place_at_any_length(ran: Ran) -> None:
    exact, model = compiled(Cached, "eager"), compiled(Cached, "chain")
    for length in (5, 6, 9, 5):
        caches = [torch.randn(1, length, 64) for _ in range(4)]
        copies = [cache.clone() for cache in caches]
        place = torch.tensor([length - 1])
        expected, found = exact(X[None], copies, place), model(X[None], caches, place)
        close(found[0], expected[0])
        close(caches, copies)
        assert found[1] == expected[1] == length + 1
        assert type(found[1]) is int
    assert len(ran) == 4


def test_an_error_in_the_middle_is_told_and_leaves_nothing(tmp_path: Path, ran: Ran) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    path = write_module(tmp_path / "m.gguf", Asking(), {}, "Q8_0")
    model: Any = qcompile.optimize(Asking(), checkpoint=path, emitter="chain")
    good: Any = torch.tensor([[3]])
    bad: Any = torch.tensor([[40]])
    expected = exact_copy(path, Asking())(good)
    close(model(good), expected)
    held = (good._use_count(), bad._use_count())

    def fail(times: int) -> None:
        for _ in range(times):
            with pytest.raises(LowerError, match=r"id 40 is outside 0\.\.31"):
                model(bad)

    status = Path("/proc/self/status")

    def resident() -> int:
        text = status.read_text() if status.exists() else "VmRSS: 0"
        return int(text.split("VmRSS:")[1].split()[0]) << 10

    fail(100)
    before = resident()
    fail(1000)
    # A handle that is left keeps more than 500 bytes with 64 floats: one a call is half of it.
    assert resident() - before < 256 << 10
    assert (good._use_count(), bad._use_count()) == held
    close(model(good), expected)
    assert len(ran) == 1102


def test_threads_may_run_one_chain_at_once(ran: Ran) -> None:
    model, call = compiled(stack, "chain"), torch.ops.qcompile_cpu.chain_run
    inputs = [X * scale for scale in (1, 2, 3, 4)]
    expected = [model(x) for x in inputs]
    one, given = ran[0]
    gate = threading.Barrier(len(inputs))

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        gate.wait(60)
        tensors = [x if value is inputs[0] else value for value in given]
        return [call(tensors, one._number)[0] for _ in range(200)]

    with torch.no_grad(), ThreadPoolExecutor(len(inputs)) as pool:
        found = list(pool.map(run, inputs))
    for results, one_by_one in zip(found, expected, strict=True):
        assert all(torch.equal(result, one_by_one) for result in results)


def test_a_chain_goes_with_its_model_and_so_do_its_constants(ran: Ran) -> None:
    model, call = compiled(stack, "chain"), torch.ops.qcompile_cpu.chain_run
    model(X)
    number, tensors = ran[0][0]._number, list(ran[0][1])
    with pytest.raises(RuntimeError, match=f"a chain takes {len(tensors)} tensors"):
        call([*tensors, X], number)
    weights = model.qcompile._packed.values()
    packed = [weakref.ref(part) for weight in weights for part in weight.parts.values()]
    del weights
    assert packed
    left = weakref.ref(ran[0][0])
    ran.clear()
    del model
    torch._dynamo.reset()
    gc.collect()
    assert left() is None
    assert not any(tensor() is not None for tensor in packed)
    with pytest.raises((RuntimeError, IndexError)):
        call(tensors, number)


def test_code_from_the_cache_is_chained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ran: Ran
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for key in ("fxgraph_cache_miss", "fxgraph_cache_hit"):
        counters.clear()
        compiled(stack, "chain")(X)
        assert set(counters["inductor"]) & {"fxgraph_cache_miss", "fxgraph_cache_hit"} == {key}
    assert len(ran) == 2


@pytest.mark.parametrize("known", [None, SimpleNamespace(static_input_indices=[])])
def test_a_torch_that_tells_less_runs_region_by_region(
    known: object, monkeypatch: pytest.MonkeyPatch, ran: Ran
) -> None:
    expected = compiled(stack, "eager")(X)
    told = property(lambda _: known, lambda _, value: None)
    monkeypatch.setattr(TracingContext, "fw_metadata", told, raising=False)
    close(compiled(stack, "chain")(X), expected)
    assert not ran


def test_code_without_the_entry_runs_region_by_region(
    monkeypatch: pytest.MonkeyPatch, ran: Ran
) -> None:
    expected = compiled(stack, "eager")(X)
    monkeypatch.setattr(chain, "_ENTRY", "of another release")
    close(compiled(stack, "chain")(X), expected)
    assert not ran
