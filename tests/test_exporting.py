"""What is refused before a compilation is saved, and that nothing is left behind."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.artifacts import llama_folder
from support.zoo import DATA

import qcompile
from qcompile import exporting
from qcompile.errors import CaptureError, LowerError, OptionError, QCompileError, SchemeError

FILE = DATA / "gguf-q2_k.gguf"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_folder(tmp_path_factory.mktemp("source") / "m")


def _told(error: QCompileError) -> str:
    assert all((error.where, error.found, error.needed, error.fix))
    return str(error)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"context": 511}, "context=511"),
        ({"context": -1}, "context=-1"),
        ({"context": 4096.0}, "context=4096.0"),
        ({"context": True}, "context=True"),
        ({"device": "npu:910b"}, "'npu:910b': its code cannot be saved"),
        ({"device": "cuda:sm90"}, "'cuda:sm90': its code cannot be saved"),
        ({"device": "abacus"}, "abacus"),
        ({"scheme": "gptqq"}, "gptqq"),
        ({"numerics": "quick"}, "quick"),
        ({"dtype": torch.int8}, "int8"),
    ],
)
def test_options_of_export(tmp_path: Path, options: dict[str, Any], told: str) -> None:
    with pytest.raises(OptionError, match=told) as caught:
        qcompile.export(FILE, tmp_path / "out", **options)
    _told(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_places_of_export(tmp_path: Path) -> None:
    def loads(*given: Any, **options: Any) -> Any:
        raise AssertionError("it loaded before it looked at the place")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporting, "load", loads)
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "mine").write_text("precious")
        with pytest.raises(OptionError, match="is not empty"):
            qcompile.export(FILE, tmp_path / "full")
        with pytest.raises(OptionError, match="is a file"):
            qcompile.export(FILE, tmp_path / "full" / "mine", overwrite=True)
        model = tmp_path / "models" / "m.gguf"
        model.parent.mkdir()
        shutil.copy(FILE, model)
        link = tmp_path / "links" / "m.gguf"
        link.parent.mkdir()
        link.symlink_to(model)
        for path, place in ((model, model.parent), (model, tmp_path), (link, link.parent)):
            with pytest.raises(OptionError, match="is or holds the checkpoint"):
                qcompile.export(path, place, overwrite=True)
    assert (tmp_path / "full" / "mine").read_text() == "precious"
    assert model.is_file()


def test_a_checkpoint_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(SchemeError):
        qcompile.export(tmp_path / "none.gguf", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("failure", [KeyboardInterrupt, RuntimeError()])
def test_a_failure_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Any
) -> None:
    from torch._inductor import compile_fx

    def fails(*given: Any, **options: Any) -> Any:
        raise failure

    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("precious")
    monkeypatch.setattr(compile_fx, "compile_fx_aot", fails)
    expected = KeyboardInterrupt if failure is KeyboardInterrupt else LowerError
    with pytest.raises(expected) as caught:
        qcompile.export(source, tmp_path / "out", context=512, overwrite=True)
    if isinstance(caught.value, LowerError):
        assert "Inductor failed" in _told(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "mine").read_text() == "precious"


def test_no_model_of_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 32))
    qcompile.optimize(model, scheme="rtn", group_size=32, emitter="eager")
    monkeypatch.setattr(exporting, "load", lambda *given, **options: (model, None))
    with pytest.raises(CaptureError, match="Sequential: forward takes input"):
        qcompile.export(FILE, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
