"""``qcompile eval`` on small checkpoints, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gguf_writer import tiny_model, write_model
from support.zoo import DATA
from test_hf import TOKENS

from qcompile.bench.models import decoded_model
from qcompile.cli import main
from qcompile.schemes import open_checkpoint

FILE = DATA / "gguf-q2_k.gguf"
OTHER = DATA / "gptq-w2-g32-asym"
TEXT = "def area(width, height):\n    return width * height\n" * 20


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint's own weights in float32, as a folder that transformers loads."""
    folder = tmp_path_factory.mktemp("floats")
    model: Any
    model, tokenizer = decoded_model(open_checkpoint(FILE), torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def run(*words: object) -> int:
    options = ("--emitter", "eager", "--window", "64", "--tokens", "200")
    return main(["eval", *map(str, words), *options])


def results(capsys: pytest.CaptureFixture[str], *words: object) -> list[dict[str, Any]]:
    assert run(*words, "--json") == 0
    said = capsys.readouterr()
    assert said.err == ""
    found: list[dict[str, Any]] = json.loads(said.out)["results"]
    return found


def test_json(capsys: pytest.CaptureFixture[str], text: Path, floats: Path) -> None:
    against = ("--against", "float", "--against", floats, "--against", OTHER)
    [found] = results(capsys, FILE, "--text", text, *against)
    assert (found["scheme"], found["windows"], found["tokens"]) == ("gguf", 3, 3 * 63)
    own, loaded, other = found["against"].values()
    assert list(found["against"]) == ["float", str(floats), str(OTHER)]
    for same in (own, loaded):
        assert same["perplexity"] == pytest.approx(found["perplexity"], rel=1e-6)
        assert same["kl"] <= same["kl_worst"] < 1e-10
        assert same["top1"] == 1.0
    assert other["kl"] > 1e-4
    assert other["top1"] < 1.0
    assert other["perplexity"] != pytest.approx(found["perplexity"], rel=1e-6)
    assert found["bits_a_weight"] == pytest.approx(3.35, abs=0.01)


def test_a_kernel_that_computes_wrongly_is_seen(
    capsys: pytest.CaptureFixture[str], text: Path
) -> None:
    """Emulated on a device that rounds to 8 bits, the text is predicted otherwise."""
    npu = ("--device", "npu:310p", "--on-unsupported", "requantize", "--emulate")
    [found] = results(capsys, FILE, "--text", text, *npu)
    [own] = found["against"].values()
    assert 1e-7 < own["kl"] < 0.1
    assert own["perplexity"] != pytest.approx(found["perplexity"], rel=1e-7)


def test_rounded_activations_are_told(capsys: pytest.CaptureFixture[str], text: Path) -> None:
    [found] = results(capsys, FILE, "--text", text, "--numerics", "fast")
    assert (found["numerics"], found["against"]["float"]["kl"] < 0.1) == ("fast", True)
    assert run(FILE, "--text", text, "--numerics", "fast", "--against", "none") == 0
    assert capsys.readouterr().out.endswith("; numerics fast\n")


def test_a_table_over_checkpoints(
    capsys: pytest.CaptureFixture[str], text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(FILE, OTHER, "--text", text) == 0
    said = capsys.readouterr()
    assert said.err == ""
    above, heads, first, second, remark = said.out.splitlines()
    assert above.strip() == "against float"
    assert heads.split() == [
        *("checkpoint", "scheme", "bits", "packed", "perplexity", "perplexity", "KL", "top-1"),
    ]
    assert first.split()[:3] == ["gguf-q2_k.gguf", "gguf", "3.35"]
    assert second.split()[:3] == ["gptq-w2-g32-asym", "gptq", "2.75"]
    assert first.endswith("100.00%")
    assert len({len(line) for line in (above, heads, first, second)}) == 1
    assert remark == "189 tokens predicted; KL in nats, a mean over them"
    monkeypatch.setenv("COLUMNS", "70")
    assert run(FILE, "--text", text, "--against", "none") == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 70
    assert lines[0].split()[0] == "checkpoint"
    assert lines[0].split()[-1] == "perplexity"
    assert lines[-1] == "189 tokens predicted"


def test_a_narrow_table_keeps_the_distances(
    capsys: pytest.CaptureFixture[str], text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(FILE, "--text", text, "--against", "float", "--against", OTHER) == 0
    above, heads, row, _ = capsys.readouterr().out.splitlines()
    assert len(above) == len(heads) == len(row) <= 80
    assert above.split("  ")[-1].strip() == "against gptq-w2-g32-asym"
    assert heads.split() == ["checkpoint", "perplexity", "KL", "top-1", "KL", "top-1"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--window", "1"), "windows of 2 tokens"),
        (("--tokens", "0"), "windows of 2 tokens"),
        (("--against", "none", "--against", "float"), "none beside others"),
        (("--against", "nowhere"), "no such file or folder"),
        (("--dtype", "float23"), "did you mean 'float32'"),
        (("--device", "npu:310p"), "no kernel for 29 of 30"),
    ],
)
def test_options_that_are_none(
    capsys: pytest.CaptureFixture[str], text: Path, words: tuple[str, ...], says: str
) -> None:
    assert main(["eval", str(FILE), "--text", str(text), "--emitter", "eager", *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert says in said.err


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"", "empty"), (b"\xff\xfe\x00", "not UTF-8"), (b"x", "2 or more"), (None, "No such file")],
)
def test_texts_that_are_none(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes | None, says: str
) -> None:
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    assert main(["eval", str(FILE), "--text", str(path), "--emitter", "eager"]) == 2
    assert says in capsys.readouterr().err


def test_another_tokenizer_is_refused(
    capsys: pytest.CaptureFixture[str], text: Path, tmp_path: Path
) -> None:
    path = write_model(tmp_path / "tiny.gguf", "qwen2", tiny_model("qwen2"), metadata=TOKENS)
    assert run(FILE, "--text", text, "--against", path) == 2
    assert "its tokenizer cuts the text otherwise" in capsys.readouterr().err


def test_a_folder_that_is_no_model(
    capsys: pytest.CaptureFixture[str], text: Path, tmp_path: Path
) -> None:
    assert run(FILE, "--text", text, "--against", tmp_path) == 2
    said = capsys.readouterr().err
    assert "SchemeError" in said
    assert "transformers cannot load it" in said
