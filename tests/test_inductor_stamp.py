"""Code that Inductor cached for another build of our ops is not used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

import qcompile
from qcompile.backends.cpu.probe import find_compiler
from qcompile.inductor_stamp import Stamp, settings

PROGRAM = """
import sys, torch, qcompile
from torch._dynamo.utils import counters
qcompile.__version__ = sys.argv[1]

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(32, 16)
    def forward(self, x):
        return self.linear(x).relu() + 1

model = qcompile.optimize(Model(), scheme="rtn", bits=8, emitter="inductor")
model(torch.ones(2, 32))
print(counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"])
"""


def test_the_stamp_tells_versions_and_libraries_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Stamp().uuid()
    assert Stamp().uuid() == first
    monkeypatch.setattr(torch.ops, "loaded_libraries", {"/somewhere/cpu-0123.so"})
    second = Stamp().uuid()
    monkeypatch.setattr(qcompile, "__version__", "another")
    assert len({first, second, Stamp().uuid()}) == 3


def test_a_pass_of_the_user_stays() -> None:
    class Own(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            pass

        def uuid(self) -> str:
            return "own"

    with config.patch(post_grad_custom_post_pass=Own()):
        assert settings() == {}


@pytest.mark.skipif(not find_compiler(), reason="no C++ compiler")
def test_a_new_version_compiles_anew(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}

    def run(version: str) -> list[str]:
        command = [sys.executable, str(tmp_path / "program.py"), version]
        ran = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        return ran.stdout.split()

    assert run("1") == ["0", "1"]
    assert run("1") == ["1", "0"]
    assert run("2") == ["0", "1"]
