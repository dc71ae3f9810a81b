"""Code that Inductor cached for another build of our ops is not used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

import qcompile
from qcompile.backends.cpu.probe import find_compiler
from qcompile.inductor_stamp import Stamp, settings


def test_the_stamp_tells_versions_and_libraries_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Stamp().uuid()
    assert Stamp().uuid() == first
    monkeypatch.setattr(torch.ops, "loaded_libraries", {"/somewhere/cpu-0123.so"})
    second = Stamp().uuid()
    monkeypatch.setattr(qcompile, "__version__", "another")
    assert len({first, second, Stamp().uuid()}) == 3


def test_a_pass_of_the_user_runs_and_counts() -> None:
    seen: list[torch.fx.Graph] = []

    class Own(CustomGraphPass):
        def __init__(self, name: str) -> None:
            self.name = name

        def __call__(self, graph: torch.fx.Graph) -> None:
            seen.append(graph)

        def uuid(self) -> str:
            return self.name

    def stamp_with(own: Any) -> Stamp:
        with config.patch(post_grad_custom_post_pass=own):
            found = settings()["post_grad_custom_post_pass"]
        assert isinstance(found, Stamp)
        return found

    graph = torch.fx.Graph()
    stamp_with(Own("a"))(graph)
    assert seen == [graph]
    keys = {stamp_with(own).uuid() for own in (None, Own("a"), Own("b"))}
    assert len(keys) == 3
    assert stamp_with(seen.append).uuid() is None  # without an identity nothing is cached


@pytest.mark.skipif(not find_compiler(), reason="no C++ compiler")
def test_a_new_version_compiles_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(32, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.linear(x).relu() + 1
            return result

    def run(version: str) -> tuple[int, int]:
        monkeypatch.setattr(qcompile, "__version__", version)
        torch._dynamo.reset()
        counters.clear()
        qcompile.optimize(Model(), scheme="rtn", bits=8, emitter="inductor")(torch.ones(2, 32))
        seen = counters["inductor"]
        return seen["fxgraph_cache_hit"], seen["fxgraph_cache_miss"]

    assert run("1") == (0, 1)
    assert run("1") == (1, 0)
    assert run("2") == (0, 1)
