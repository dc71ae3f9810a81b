"""``qcompile bench kernels``: what it refuses, and its table."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from qcompile.bench import kernels
from qcompile.cli import main


def row(case: str, broken: Sequence[str] = ()) -> dict[str, Any]:
    return {
        "case": case,
        "arch": "sm90",
        "tile": "8x128x256",
        "warps": 4,
        "stages": 4,
        "registers": 158,
        "stack": 8 * len(broken),
        "local": 0,
        "shared": 66048,
        "per_weight": 2.234,
        "counts": {"HGMMA": 32, "LOP3": 128},
        "broken": list(broken),
    }


def test_kernels_of_a_gpu_are_not_timed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernels", "--device", "cuda:sm90"]) == 2
    said = capsys.readouterr().err
    assert "--device cuda:sm90" in said
    assert "python -m qcompile.bench.device" in said


def test_without_the_compiler(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert main(["bench", "kernels", "--aot"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "compiling ahead of time: " in said.err


def test_an_architecture_that_is_not_known(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qcompile.backends.cuda.ahead.require_compiler", lambda: None)
    assert main(["bench", "kernels", "--aot", "--arch", "sm91"]) == 2
    said = capsys.readouterr().err
    assert "--arch sm91: unknown" in said
    assert "sm90" in said


def test_the_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def rows(architectures: Sequence[str], only: str) -> Iterator[dict[str, Any]]:
        assert (tuple(architectures), only) == (("sm90",), "w4")
        yield row("w4 g128 float16 M1")
        yield row("w4 g64 float16 M1", ["nothing may spill: stack 8, local 0 (why)"])

    monkeypatch.setattr(kernels, "_rows", rows)
    file = tmp_path / "figures.json"
    options = ["--arch", "sm90", "--only", "w4", "--json", str(file)]
    assert main(["bench", "kernels", "--aot", *options]) == 1
    head, first, second, reason, last = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["kernel", "arch", "tile"]
    assert first.endswith("66048    2.23    32 HGMMA")
    assert second.startswith("w4 g64 float16 M1 ")
    assert reason == "    nothing may spill: stack 8, local 0 (why)"
    assert last == "2 kernels, 1 rules broken; compiled, not run"
    assert [one["registers"] for one in json.loads(file.read_text())] == [158, 158]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["kernels", "--formats", "q4_k,nope"], "format 'nope': unknown"),
        (["kernels", "--arch", "sm90"], "--arch: not read without --aot"),
        (["kernels", "--aot", "--rows", "1"], "--rows: not read with --aot"),
        (["kernels", "pyproject.toml", "--shapes", "64x64"], "--shapes: not read beside a file"),
        (["kernels", "--json", "no-such-folder/x.json"], "--json no-such-folder/x.json"),
        (["transforms", "--markdown", "."], "--markdown ."),
        (["compile", "--numerics", "quick"], "--numerics quick: unknown"),
        (["compile", "pyproject.toml", "--layers", "2"], "--layers: not read beside a file"),
        (["model", "pyproject.toml", "--numerics", "fas"], "did you mean 'fast'"),
    ],
)
def test_refused_before_anything_is_measured(
    words: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setattr("qcompile.bench.model_process.subprocess.Popen", never)
    assert main(["bench", *words]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("OptionError: ")
    assert said in shown.err
