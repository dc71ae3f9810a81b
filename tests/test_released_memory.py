"""What is dropped once a graph is compiled, and once a weight is bound."""

from __future__ import annotations

import contextlib
import gc
import itertools
import linecache
import weakref
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


def test_a_slab_holds_tensors_as_if_each_were_alone() -> None:
    slabs = memory.Slabs()
    kinds = (torch.uint8, torch.float32, torch.int64, torch.bfloat16)
    made = [slabs.empty((3, 5 + n), kinds[n % 4]) for n in range(40)]
    for n, tensor in enumerate(made):
        assert tensor.shape == (3, 5 + n)
        assert tensor.dtype is kinds[n % 4]
        assert tensor.storage_offset() == 0
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert tensor.data_ptr() % 64 == 0
        tensor.fill_(n)
    assert all(bool((tensor == n).all()) for n, tensor in enumerate(made))
    starts = [tensor.data_ptr() for tensor in made]
    assert max(starts) - min(starts) < 64 << 10  # side by side


def test_a_slab_gives_nothing_and_much_too() -> None:
    slabs = memory.Slabs()
    assert slabs.empty((0, 4), torch.float32).shape == (0, 4)
    assert slabs.empty((), torch.int64).shape == ()
    large = slabs.empty((memory._SLAB // 4 + 1,), torch.uint8)
    rest = [slabs.empty((memory._SLAB // 4,), torch.uint8) for _ in range(6)]
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in [large, *rest])
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))
    with torch.device("meta"):
        for size in (8, memory._SLAB):
            assert memory.Slabs().empty((size,), torch.uint8).device.type == "cpu"


def test_a_slab_goes_with_the_last_of_its_tensors() -> None:
    slabs = memory.Slabs()
    first, second = slabs.empty((16,), torch.float32), slabs.empty((16,), torch.float32)
    slab = weakref.ref(slabs._slab)
    view = second[3:]
    del slabs, first, second
    gc.collect()
    assert slab() is not None
    view.fill_(1)
    del view
    gc.collect()
    assert slab() is None
