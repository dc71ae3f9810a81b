"""What is dropped once a graph is compiled, and once a weight is bound."""

from __future__ import annotations

import contextlib
import gc
import linecache
from pathlib import Path

import pytest
import torch
from support.small import write_module
from torch import fx, nn

import qcompile
from qcompile import memory


def test_lines_of_files_go_and_lines_of_generated_code_stay() -> None:
    code = fx.symbolic_trace(nn.ReLU()).forward.__code__.co_filename
    assert "relu" in "".join(linecache.getlines(code))
    assert linecache.getlines(memory.__file__)
    memory.forget_traces()
    assert memory.__file__ not in linecache.cache
    assert "relu" in "".join(linecache.getlines(code))
    assert linecache.getlines(memory.__file__)  # and they are read again when they are asked for


def test_pages_of_floats_go_once_they_are_bound(tmp_path: Path) -> None:
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("needs /proc to count resident pages")

    def mapped() -> int:
        return int(status.read_text().split("RssFile:")[1].split()[0]) << 10

    module = nn.Linear(1024, 4096, bias=False)
    size, values = module.weight.nbytes, module.weight.detach().clone()
    path = write_module(tmp_path / "m.gguf", module, {}, "F32")
    before = mapped()
    qcompile.optimize(module, checkpoint=path)
    assert mapped() - before < size // 2
    assert torch.equal(module.weight, values)


@pytest.mark.parametrize("enabled", [True, False])
def test_cycles_are_searched_for_again_as_before(enabled: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with memory.uncollected():
            with contextlib.suppress(KeyError), memory.uncollected():
                raise KeyError
            assert not gc.isenabled()
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()
