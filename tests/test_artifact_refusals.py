"""What is refused when a saved compilation is checked, opened or run."""

from __future__ import annotations

import functools
import json
import math
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from support.artifacts import Saved, gguf_model, llama_folder, logits, read
from support.zoo import DATA, relative_l2

import qcompile
from qcompile import exporting
from qcompile.artifact import Artifact
from qcompile.backends.cpu import ahead, build
from qcompile.errors import (
    ArtifactError,
    LowerError,
    OptionError,
    QCompileError,
    SchemeError,
    VerifyError,
)

FILE = DATA / "gguf-q2_k.gguf"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_folder(tmp_path_factory.mktemp("source") / "m")


@pytest.fixture(scope="module")
def made(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    torch._dynamo.reset()
    out = tmp_path_factory.mktemp("made") / "out"
    return qcompile.export(source, out, dtype=torch.bfloat16, context=512, numerics="fast")


def test_bfloat16_and_fast(made: Artifact, source: Path) -> None:
    """Both round, at other places: neither is further from the exact model than the other."""
    options: Any = {"dtype": torch.bfloat16, "numerics": "fast", "emitter": "eager"}
    rounded: Any = qcompile.load(source, **options)[0]
    exact: Any = qcompile.load(source, emitter="eager")[0]
    assert (made.header.dtype, made.header.numerics) == ("bfloat16", "fast")
    for parts in ((1,), (9,), (40,), (10, 1, 12)):
        ids = Saved(source, made, exact).ids(sum(parts))
        expected, found = logits(exact, ids)[-1], read(made, ids, parts)
        assert found.dtype is torch.bfloat16
        bound = 1.5 * relative_l2(logits(rounded, ids)[-1], expected)
        assert 0 < relative_l2(found, expected) < bound, parts


def _told(error: QCompileError) -> str:
    assert all((error.where, error.found, error.needed, error.fix))
    return str(error)


def test_an_artifact_that_answers_otherwise(
    made: Artifact, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def saves(graph_module: Any, inputs: Any, path: Path) -> None:
        shutil.copy(made.path / path.name, path)

    models: list[weakref.ref[Any]] = []
    wrong = torch.ones(made.header.vocabulary)

    def kept(*given: Any, **options: Any) -> Any:
        found = qcompile.load(*given, **options)
        models.append(weakref.ref(found[0]))
        return found

    def reads(artifact: Artifact, ids: torch.Tensor) -> torch.Tensor:
        assert models[0]() is None  # its weights are not in memory twice
        return wrong

    monkeypatch.setattr(exporting, "load", kept)
    monkeypatch.setattr(ahead, "save_code", saves)  # which takes long
    monkeypatch.setattr(Artifact, "read", reads)
    with pytest.raises(VerifyError, match="saved and traced logits differ") as caught:
        qcompile.export(source, tmp_path / "out", dtype=torch.bfloat16, context=512)
    _told(caught.value)
    assert list(tmp_path.iterdir()) == []
    wrong[0] = float("nan")
    models[:] = [lambda: None]  # type: ignore[list-item]
    one = torch.ones(48, len(wrong))
    found = exporting._differences(made, torch.ones(48, dtype=torch.int64), one)
    assert math.isnan(found.median())
    assert math.isnan(found.max())


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Artifact) -> None:
    monkeypatch.setenv("QCOMPILE_CXX", "none")
    with pytest.raises(ArtifactError, match="kernels none, for want of a C"):
        qcompile.open_artifact(made.path)
    build.load_library.cache_clear()
    file = gguf_model(tmp_path / "m.gguf", "llama", {"ffn_up.weight": "Q8_0"})
    with pytest.raises(LowerError, match="no C\\+\\+ compiler"):
        qcompile.export(file, tmp_path / "out", context=512)
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


# **** run ****


@pytest.mark.parametrize(
    "ids",
    [
        torch.tensor([], dtype=torch.int64),
        torch.tensor(5),
        torch.zeros(2, 3, dtype=torch.int64),
        torch.zeros(1, 1, 3, dtype=torch.int64),
        torch.zeros(1, 0, dtype=torch.int64),
        torch.zeros(3),
        torch.zeros(3, dtype=torch.bool),
        torch.zeros(3, dtype=torch.complex64),
        torch.zeros(3, dtype=torch.int64, device="meta"),
        torch.tensor([1, -1]),
        torch.tensor([1, 128]),
        [1, 2],
        None,
    ],
    ids=repr,
)
def test_ids(made: Artifact, ids: Any) -> None:
    made.clear()
    made.read(torch.tensor([1, 2]))
    for call in (made.read, made.generate, made.stream):
        with pytest.raises(OptionError, match=r"^ids: ") as caught:
            call(ids)
        _told(caught.value)
    assert made.length == 2  # the text that was begun is still there


@pytest.mark.parametrize("count", [0, -1, 1.5, True, None])
def test_numbers_of_tokens(made: Artifact, count: Any) -> None:
    for call in (made.generate, made.stream):  # at once, not at the first token
        with pytest.raises(OptionError, match="max_new_tokens"):
            call(torch.tensor([1]), count)


def test_texts_that_do_not_fit(made: Artifact) -> None:
    made.clear()
    with pytest.raises(OptionError, match="the text: 513 tokens"):
        made.read(torch.ones(513, dtype=torch.int64))
    assert made.length == 0
    for call in (made.generate, made.stream):
        with pytest.raises(OptionError, match="the text: 513 tokens"):
            call(torch.ones(10, dtype=torch.int64), 504)
    assert len(made.generate(torch.ones(10, dtype=torch.int64), 503, ends=False)) == 513


def test_a_tokenizer_that_was_not_there(made: Artifact) -> None:
    with pytest.raises(SchemeError, match="the checkpoint had none"):
        _ = made.tokenizer


# **** open ****


@pytest.fixture
def copy(made: Artifact, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made.path, tmp_path / "copy"))


def _refused(folder: Path, *words: str) -> None:
    with pytest.raises(ArtifactError) as caught:
        qcompile.open_artifact(folder)
    for word in words:
        assert word in _told(caught.value)


def test_no_artifact(tmp_path: Path) -> None:
    _refused(tmp_path, "no artifact.json")
    _refused(tmp_path / "nowhere", "no artifact.json")
    _refused(FILE, "no artifact.json")


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"format": 2}', "\x00", "[" * 9999])
def test_a_header_that_is_none(copy: Path, content: str) -> None:
    (copy / "artifact.json").write_text(content)
    _refused(copy, "artifact.json", "export the model again")


def _edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "artifact.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def _without(name: str, content: dict[str, Any]) -> None:
    del content[name]


def _with(name: str, value: object, content: dict[str, Any]) -> None:
    content[name] = value


def test_entries_that_are_missing_or_odd(copy: Path) -> None:
    whole = (copy / "artifact.json").read_text()
    for name in json.loads(whole):
        _edit(copy, functools.partial(_without, name))
        _refused(copy, "artifact.json", "" if name == "format" else "missing or odd")
        for odd in (None, [], {"a": None}, "x", -1, 1.5, [[1]], True):
            (copy / "artifact.json").write_text(whole)
            if type(odd) is not type(json.loads(whole)[name]):
                _edit(copy, functools.partial(_with, name, odd))
                _refused(copy)
        (copy / "artifact.json").write_text(whole)
    qcompile.open_artifact(copy)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.update(extra=1),
        lambda content: content["graphs"].pop("step"),
        lambda content: content["graphs"]["step"].pop("constants"),
        lambda content: content["graphs"]["step"].update(inputs=["ids", "positions", "2"]),
        lambda content: content["graphs"]["step"].update(inputs=["ids", "-1"]),
        lambda content: content["graphs"]["step"].update(inputs=[0, 1]),
        lambda content: content.update(context=4096),
        lambda content: content.update(caches=[[1, 2, 512]]),
        lambda content: content.update(cache_dtype="load"),
        lambda content: content.update(rows=[9]),
        lambda content: content.update(rows=[1, 0]),
        lambda content: content.update(ends=["2"]),
        lambda content: content.update(code={"torch": 1}),
    ],
)
def test_odd_entries_inside(copy: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    _edit(copy, change)
    _refused(copy, "artifact.json: an entry is missing or odd")


@pytest.mark.parametrize("name", ["torch", "processor", "kernels"])
def test_another_machine_or_torch(copy: Path, name: str) -> None:
    _edit(copy, lambda content: content["code"].update({name: "other"}))
    _refused(copy, f"made for {name} other", "export the model again")
    _edit(copy, lambda content: content["code"].pop(name))
    _refused(copy, f"made for {name} None")


def test_another_release_or_device(copy: Path) -> None:
    _edit(copy, lambda content: content.update(qcompile="9"))
    _refused(copy, "made for qcompile 9", f"qcompile {qcompile.__version__}")
    _edit(copy, lambda content: content.update(device="cuda"))
    _refused(copy, "made for cuda")
    _edit(copy, lambda content: content.update(device="abacus"))
    _refused(copy, "made for abacus")


@pytest.mark.parametrize("name", ["prompt.so", "step.so"])
def test_code_that_was_damaged(copy: Path, name: str) -> None:
    """None of these reaches the loader, which would crash at some."""
    whole = (copy / name).read_bytes()
    for damaged in (b"", b"garbage", whole[:4096], whole[:-1], whole[:-1] + b"x"):
        (copy / name).write_bytes(damaged)
        _refused(copy, name, "SHA-256")
    (copy / name).unlink()
    _refused(copy, name, "no such file")
    (copy / name).symlink_to(FILE)
    _refused(copy, name, "SHA-256")


def test_weights_that_were_damaged(copy: Path) -> None:
    path = copy / "weights.safetensors"
    whole = path.read_bytes()
    for damaged in (b"", b"garbage", whole[:100], whole[:-1], whole[:-1000]):
        path.write_bytes(damaged)
        _refused(copy, "weights.safetensors")
    path.unlink()
    _refused(copy, "no such file")


def test_weights_of_another_artifact(copy: Path) -> None:
    path = copy / "weights.safetensors"
    with safe_open(path, "pt") as file:
        mark = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(tensors, path)
    _refused(copy, "belongs to the artifact None")
    save_file(tensors, path, {"artifact": "another"})
    _refused(copy, "belongs to the artifact another")
    last = tensors.pop(max(tensors, key=int))
    save_file(tensors, path, mark)
    _refused(copy, "bytes of tensors")
    save_file({**tensors, "extra": last}, path, mark)
    _refused(copy, "weights.safetensors")
    save_file({**tensors, "9999": last}, path, mark)
    _refused(copy, "no tensor for")
