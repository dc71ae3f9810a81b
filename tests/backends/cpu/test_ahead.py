"""Code in files: what it takes, what it calls, and which file it is from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from qcompile.backends.cpu import ahead
from qcompile.backends.cpu.probe import find_compiler
from qcompile.errors import ArtifactError, LowerError

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
# Few numbers, or equal ones, would become part of the code.
X = torch.arange(32.0)


class Scaled(nn.Module):
    """``x * weight + plus``; ``turned`` does it with an op for which there is no C function."""

    def __init__(self, weight: torch.Tensor, plus: float, turned: bool = False) -> None:
        super().__init__()
        self.weight: torch.Tensor
        self.register_buffer("weight", weight)
        self.plus, self.turned = plus, turned

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        if self.turned:
            pairs = torch.view_as_complex(x.view(16, 2))
            x = torch.view_as_real(pairs.unsqueeze(0) * pairs.conj().unsqueeze(0)).reshape(32)
        return (x * self.weight + self.plus,)


def save(path: Path, module: nn.Module) -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    inputs = [mode.from_tensor(X)]
    ahead.save_code(fx.symbolic_trace(module), inputs, path)
    assert mode.allow_non_fake_inputs is False


def test_constants_are_those_that_are_given(tmp_path: Path) -> None:
    save(tmp_path / "a.so", Scaled(torch.arange(32.0), 1.0))
    assert [path.name for path in tmp_path.iterdir()] == ["a.so"]
    for factor in (3.0, 5.0):
        weight = torch.full((32,), factor)
        run = ahead.load_code(tmp_path / "a.so", {"weight": weight, "unused": X})
        torch.testing.assert_close(run([X])[0], X * factor + 1)
        weight.fill_(7)  # kept, not copied
        torch.testing.assert_close(run([X])[0], X * 7 + 1)
    with pytest.raises(ArtifactError, match="the constant weight"):
        ahead.load_code(tmp_path / "a.so", {})


def test_another_file_under_the_name_of_one_that_is_loaded(tmp_path: Path) -> None:
    path, weight = tmp_path / "a.so", torch.arange(32.0)
    save(path, Scaled(weight, 1.0))
    first = ahead.load_code(path, {"weight": weight})
    save(tmp_path / "b.so", Scaled(weight, 2.0))
    os.replace(tmp_path / "b.so", path)
    second = ahead.load_code(path, {"weight": weight})
    torch.testing.assert_close(first([X])[0], X * X + 1)
    torch.testing.assert_close(second([X])[0], X * X + 2)


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
def test_ops_that_have_no_c_function(tmp_path: Path) -> None:
    module = Scaled(torch.arange(32.0), 1.0, turned=True)
    save(tmp_path / "a.so", module)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "a.so"]
    run = ahead.load_code(tmp_path / "a.so", {"weight": module.get_buffer("weight")})
    torch.testing.assert_close(run([X])[0], module(X)[0])


def test_what_cannot_be_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import compile_fx

    def fails(*given: Any, **options: Any) -> Any:
        raise RuntimeError

    monkeypatch.setattr(compile_fx, "compile_fx_aot", fails)
    with pytest.raises(LowerError, match=r"code for a\.so: Inductor failed: RuntimeError"):
        save(tmp_path / "a.so", Scaled(torch.ones(32), 1.0))
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.so").write_text("garbage")
    with pytest.raises(ArtifactError, match="code as it was exported"):
        ahead.load_code(tmp_path / "a.so", {})
