"""What cannot be written as a GPTQ folder, and what a failure leaves behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.saved import config_of, llama, quantized
from support.small import write_module
from torch import nn

import qcompile
from qcompile.errors import OptionError


class Broken:
    """A tokenizer that fails while it is saved."""

    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{")
        raise KeyboardInterrupt


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    model = quantized(llama(), bits=4, group_size=32)
    with pytest.raises(KeyboardInterrupt):
        qcompile.save_checkpoint(model, tmp_path / "m", tokenizer=Broken())
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "mine").write_text("precious")
    with pytest.raises(KeyboardInterrupt):
        qcompile.save_checkpoint(model, tmp_path / "m", tokenizer=Broken(), overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    assert (tmp_path / "m" / "mine").read_text() == "precious"


def test_a_full_folder_is_not_overwritten_unasked(tmp_path: Path) -> None:
    model = quantized(llama(), bits=4, group_size=32)
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(OptionError, match="is not empty"):
        qcompile.save_checkpoint(model, tmp_path)
    with pytest.raises(OptionError, match="is a file"):
        qcompile.save_checkpoint(model, tmp_path / "mine")
    (tmp_path / "empty").mkdir()
    qcompile.save_checkpoint(model, tmp_path / "empty")
    folder = qcompile.save_checkpoint(model, tmp_path / "empty", "gptq_v2", overwrite=True)
    assert qcompile.open(folder).facts()
    assert config_of(folder)["quantization_config"]["checkpoint_format"] == "gptq_v2"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "mine"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"format": "gptqv2"}, "did you mean 'gptq_v2'"),
        ({"format": "awq"}, "one of gptq, gptq_v2"),
        ({"shard_bytes": 0}, "shard_bytes=0"),
        ({"shard_bytes": "5GB"}, "shard_bytes='5GB'"),
    ],
)
def test_an_argument_without_meaning(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    model = quantized(nn.Sequential(nn.Linear(64, 32)), group_size=32)
    with pytest.raises(OptionError, match=message):
        qcompile.save_checkpoint(model, tmp_path / "m", **given)
    assert list(tmp_path.iterdir()) == []


def test_models_that_have_no_gptq_form(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="was not compiled by qcompile"):
        qcompile.save_checkpoint(nn.Linear(64, 32), tmp_path / "m")
    model = quantized(nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 10)), group_size=32)
    with pytest.raises(OptionError, match=r"1: shape 10 x 32: .*\n.*multiples of 32"):
        qcompile.save_checkpoint(model, tmp_path / "m")
    model = quantized(nn.Sequential(nn.Linear(64, 32)), bits=5, group_size=32)
    with pytest.raises(OptionError, match=r"0: 5 bits: .*\n.*one of 2, 3, 4, 8 bits"):
        qcompile.save_checkpoint(model, tmp_path / "m")
    module = nn.Sequential(nn.Linear(256, 32)).eval()
    file = write_module(tmp_path / "m.gguf", module, {}, "Q4_1")
    qcompile.optimize(module, checkpoint=file, emitter="eager")
    with pytest.raises(OptionError, match="0: spec q4_1: GPTQ's formats cannot store it"):
        qcompile.save_checkpoint(module, tmp_path / "m")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_a_quantized_embedding_is_named(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Embedding(32, 64), nn.Linear(64, 32)).eval()
    file = write_module(tmp_path / "m.gguf", module, {}, "Q8_0")
    qcompile.optimize(module, checkpoint=file, emitter="eager")
    with pytest.raises(OptionError, match=r"0\.weight: a quantized parameter of a Embedding"):
        qcompile.save_checkpoint(module, tmp_path / "m")
