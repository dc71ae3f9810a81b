"""A checkpoint and a model that do not belong together give one clear error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.gguf_writer import tiny_model, write_model
from support.small import write_module
from torch import nn

import qcompile
from qcompile.errors import OptionError, QCompileError, SchemeError


def pair(columns: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(columns, 64), nn.Linear(64, 32))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_module(tmp_path / "pair.gguf", pair(), {}, "Q8_0")


def parts(error: QCompileError) -> str:
    assert all((error.where, error.found, error.needed, error.fix))
    return str(error)


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return tiny_model("llama")


def test_other_shapes(file: Path) -> None:
    for call in (qcompile.optimize, qcompile.plan):
        with pytest.raises(SchemeError) as caught:
            call(pair(96), checkpoint=file)
        assert "pair.gguf: 0.weight: shape (64, 64)" in parts(caught.value)
        assert "shape (64, 96) for the parameter 0.weight" in caught.value.needed


def test_a_tensor_that_nothing_consumes(file: Path) -> None:
    with pytest.raises(SchemeError) as caught:
        qcompile.optimize(pair()[:1], checkpoint=file)
    assert "unused in the checkpoint:  1.weight, 1.bias" in parts(caught.value)


def test_a_tensor_that_the_model_needs(tmp_path: Path, llama: nn.Module) -> None:
    path = write_model(tmp_path / "m.gguf", "llama", llama, drop=("blk.1.ffn_up.weight",))
    for given in (path, str(path)):
        with pytest.raises(SchemeError) as caught:
            qcompile.plan(given)
        assert "model.layers.1.mlp.up_proj.weight" in parts(caught.value)
    with pytest.raises(SchemeError, match="up_proj"):
        qcompile.optimize(llama, checkpoint=path)


def test_a_tensor_too_many(tmp_path: Path, llama: nn.Module) -> None:
    extra: Any = {"blk.0.attn_gate.weight": torch.zeros(64, 64).numpy()}
    path = write_model(tmp_path / "m.gguf", "llama", llama, extra=extra)
    with pytest.raises(SchemeError) as caught:
        qcompile.plan(path)
    assert "blk.0.attn_gate.weight" in parts(caught.value)


def test_another_architecture(tmp_path: Path, llama: nn.Module) -> None:
    path = write_model(tmp_path / "m.gguf", "llama", llama, metadata={})
    content = path.read_bytes().replace(b"llama", b"lxama")
    path.write_bytes(content)
    for call in (qcompile.plan, qcompile.load):
        with pytest.raises(SchemeError) as caught:
            call(path)
        assert "architecture 'lxama'" in parts(caught.value)
        assert "did you mean 'llama'" in caught.value.fix


def test_a_model_that_is_smaller_than_the_file(tmp_path: Path, llama: nn.Module) -> None:
    path = write_model(tmp_path / "m.gguf", "llama", llama)
    with pytest.raises(SchemeError) as caught:
        qcompile.plan(tiny_model("llama", num_hidden_layers=2), checkpoint=path)
    assert "unused in the checkpoint" in parts(caught.value)
    with pytest.raises(SchemeError, match=r"shape \(96, 64\)[\s\S]*shape \(128, 64\)"):
        qcompile.plan(tiny_model("llama", intermediate_size=128), checkpoint=path)


@pytest.mark.parametrize(
    "options",
    [
        {"scheme": "ggfu"},
        {"device": "gpu"},
        {"emitter": "inductr"},
        {"on_unsupported": "dequantise"},
        {"emulate": True},
    ],
)
def test_options(file: Path, options: dict[str, Any]) -> None:
    model = pair()
    with pytest.raises(OptionError) as caught:
        qcompile.optimize(model, checkpoint=file, **options)
    assert str(next(iter(options.values()))) in parts(caught.value)
    assert not hasattr(model, "qcompile")


def test_no_checkpoint() -> None:
    with pytest.raises(OptionError, match=r'checkpoint="model\.gguf"'):
        qcompile.optimize(pair())
