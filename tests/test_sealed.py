"""What a compiled module refuses, and what still works."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.small import exact_copy, write_module
from torch import nn

import qcompile
from qcompile.errors import OptionError

X = torch.randn(3, 64)


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_module(tmp_path / "m.gguf", plain(), {}, "Q8_0")


REFUSED: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "deepcopy": (copy.deepcopy, "copied or pickled"),
    "pickle": (pickle.dumps, "copied or pickled"),
    "save": (lambda model: torch.save(model, io.BytesIO()), "copied or pickled"),
    "half": (nn.Module.half, "converted or moved"),
    "to dtype": (lambda model: model.to(torch.bfloat16), "converted or moved"),
    "to device": (lambda model: model.to("meta"), "converted or moved"),
    "to_empty": (lambda model: model.to_empty(device="meta"), "converted or moved"),
    "save state": (lambda model: torch.save(model.state_dict(), io.BytesIO()), "saved"),
    "pickle state": (lambda model: pickle.dumps(model.state_dict(keep_vars=True)), "saved"),
}


@pytest.mark.parametrize("call", REFUSED)
@pytest.mark.parametrize("run", [False, True])
def test_refused(file: Path, call: str, run: bool) -> None:
    torch._dynamo.reset()
    model = qcompile.optimize(plain(), checkpoint=file, emitter="eager")
    if run:
        model(X)
    action, done = REFUSED[call]
    with pytest.raises(OptionError, match=f"cannot be {done}.*stand-ins"):
        action(model)
    torch.testing.assert_close(model(X), exact_copy(file, plain())(X), rtol=1e-5, atol=1e-5)


def test_calls_that_change_nothing(file: Path) -> None:
    torch._dynamo.reset()
    model = qcompile.optimize(plain(), checkpoint=file, emitter="eager")
    assert {n: v.shape for n, v in model.state_dict().items()} == {
        n: v.shape for n, v in plain().state_dict().items()
    }
    same = model.to("cpu").float().cpu().eval().requires_grad_(False)
    assert same is model
    torch.testing.assert_close(model(X), exact_copy(file, plain())(X), rtol=1e-5, atol=1e-5)


def test_a_module_around_it_is_refused_too(file: Path) -> None:
    outer = nn.ModuleList([qcompile.optimize(plain(), checkpoint=file, emitter="eager")])
    for call in (copy.deepcopy, nn.Module.half, REFUSED["save state"][0]):
        with pytest.raises(OptionError, match="a compiled module cannot be"):
            call(outer)
