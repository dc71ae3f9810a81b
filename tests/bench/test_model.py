"""The harness that measures a model: its processes, its arithmetic, its tables and its pictures."""

from __future__ import annotations

import json
import os
import sys
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest

import qcompile
from qcompile.bench import model_table
from qcompile.bench.model import (
    Figures,
    Options,
    Report,
    Size,
    _load,
    _Run,
    measure,
    prompts,
    ratios,
    steps,
)
from qcompile.bench.model_plots import against_batch, write
from qcompile.bench.model_process import BenchError, pinned, started
from qcompile.bench.peers import INTERPRETER, Contender, Missing, peers
from qcompile.bench.synthetic import Shape
from qcompile.bench.synthetic import write as write_synthetic
from qcompile.cli import main
from qcompile.errors import OptionError

SMALL = Shape(layers=8, hidden=256, inner=512, heads=4, vocabulary=300, context=512)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "small.gguf"
    write_synthetic(path, SMALL)
    return path


ONE, FOUR = Size(512, 1), Size(512, 4)


def report(batches: tuple[int, ...] = (1, 4), prompts: tuple[int, ...] = (512,)) -> Report:
    own = Figures("qcompile", "ours", load=1.5, weights=10**6, top1=0.5, kl=0.25)
    own.prefill = {ONE: [100.0, 300.0, 200.0], FOUR: [400.0] * 3}
    own.decode = {ONE: [10.0] * 3, FOUR: [30.0]}
    own.versions = {"torch": "2.x"}
    peer = Figures("llama.cpp", "theirs")
    peer.prefill, peer.decode = {ONE: [50.0, 100.0, 50.0]}, {ONE: [20.0, 5.0, 10.0]}
    machine = {"processor": "a <processor>", "cores": 2, "memory": 2 << 30}
    missing = [Missing("transformers", "not here")]
    options = Options("model.gguf", prompts=prompts, batches=batches, threads=2)
    return Report(options, machine, "2026-01-02", [own, peer], missing)


# **** the synthetic file ****


def test_synthetic_weights(file: Path) -> None:
    checkpoint = qcompile.open(file)
    types = set()
    for name, weight in checkpoint.tensors.items():
        if not name.endswith("norm.weight") and name.endswith("weight"):
            types.add(str(weight.spec))
            values = checkpoint.dequantize(name)
            assert values.isfinite().all()
            assert abs(values.mean()) < 2e-3
            assert 0.015 < values.std() < 0.03
    assert types == {"q4_k", "q6_k"}


def test_synthetic_bytes_are_reproducible(file: Path, tmp_path: Path) -> None:
    write_synthetic(tmp_path / "again.gguf", SMALL)
    assert (tmp_path / "again.gguf").read_bytes() == file.read_bytes()
    write_synthetic(tmp_path / "other.gguf", SMALL, seed=1)
    assert (tmp_path / "other.gguf").read_bytes() != file.read_bytes()


@pytest.mark.parametrize("change", [{"hidden": 100}, {"inner": 300}, {"vocabulary": 257}])
def test_synthetic_refusals(tmp_path: Path, change: dict[str, int]) -> None:
    with pytest.raises(OptionError):
        write_synthetic(tmp_path / "x.gguf", Shape(**change))


# **** processes ****


def test_a_process_that_dies_is_named() -> None:
    says = "import os, sys; input(); print('why', file=sys.stderr, flush=True); os.abort()"
    dies = (sys.executable, "-c", says)
    contender = Contender("frail", dies, True, "")
    with started(contender, 1) as process, pytest.raises(BenchError) as caught:
        process.ask("load")
    assert "frail, load: its process was ended by SIGABRT" in str(caught.value)
    assert "why" in str(caught.value)


def test_a_process_that_refuses_is_named() -> None:
    says = 'input(); print(\'{"error": "no such file"}\')'
    with (
        started(Contender("picky", (sys.executable, "-c", says), True, ""), 1) as process,
        pytest.raises(BenchError, match="picky, load: no such file"),
    ):
        process.ask("load")


def test_a_peer_that_refuses_a_checkpoint_is_told() -> None:
    says = 'input(); print(\'{"refused": "rows of 7 columns"}\')'
    with started(Contender("picky", (sys.executable, "-c", says), True, ""), 1) as process:
        run = _Run(process, Figures("picky", ""))
        with pytest.raises(BenchError, match=r"picky, load: rows of 7 columns"):
            _load(run, Options("model.gguf"))


def test_threads_are_bound() -> None:
    given = pinned(1)
    assert given["OMP_NUM_THREADS"] == "1"
    if hasattr(os, "sched_getaffinity"):
        assert given["OMP_PLACES"] == f"{{{min(os.sched_getaffinity(0))}}}"


# **** peers ****


def test_a_peer_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = tmp_path / "python"
    empty.write_text('#!/bin/sh\necho "ModuleNotFoundError: llama_cpp" >&2\nexit 1\n')
    empty.chmod(0o755)
    monkeypatch.setenv(INTERPRETER, str(empty))
    (found,) = peers(["llama.cpp"], "model.gguf", "cpu")
    assert isinstance(found, Missing)
    assert "pip install llama-cpp-python" in found.reason
    assert "ModuleNotFoundError" in found.reason
    monkeypatch.setenv(INTERPRETER, str(tmp_path / "nothing"))
    (found,) = peers(["llama.cpp"], "model.gguf", "cpu")
    assert isinstance(found, Missing)
    assert "No such file" in found.reason


def test_peers_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"llama\.cpp, transformers"):
        peers(["vllm"], "model.gguf", "cpu")
    (file,) = peers(["gptqmodel"], "model.gguf", "cpu")
    assert isinstance(file, Missing)
    assert "GPTQ" in file.reason
    assert [p.name for p in peers(["torchao"], "model.gguf", "cpu")] == [
        "torchao-int4",
        "torchao-int8",
    ]
    (folder,) = peers(["llama.cpp"], str(tmp_path), "cpu")
    assert isinstance(folder, Missing)
    assert "folder" in folder.reason
    assert all(isinstance(p, Missing) for p in peers(["transformers"], "model.gguf", "cuda:sm90"))


# **** arithmetic and tables ****


def test_ratios_are_medians_of_rounds() -> None:
    own, peer = report().contenders
    assert ratios(own, peer, ONE) == (3.0, 1.0)  # of 2, 3, 4 and of 0.5, 2, 1
    assert ratios(own, peer, FOUR) is None


def test_prompts_are_the_same_everywhere() -> None:
    assert prompts(1000, 2, 5) == prompts(1000, 2, 5)
    assert prompts(1000, 2, 5)[0] != prompts(1000, 2, 5)[1]
    assert all(100 <= token < 500 for row in prompts(1000, 4, 100) for token in row)


def test_text() -> None:
    lines = model_table.text(report()).splitlines()
    assert max(map(len, lines)) <= 100
    assert " ".join(lines[1].split()) == "qcompile 512 1 200 100 to 300 10.0 10.0 to 10.0"
    assert lines[2].endswith("3.00x, 1.00x")
    assert lines[4].endswith("not measured")
    assert "transformers: not here" in lines
    assert lines[-1] == "llama.cpp: measured with one sequence only"
    assert "50.0%" in lines[7]
    assert lines[7].endswith("0.25")


def test_markdown_and_json() -> None:
    shown = model_table.markdown(report())
    assert "2026-01-02, a <processor>, 2 cores, 2 GiB; 2 threads each" in shown
    assert "torch 2.x." in shown
    assert "- transformers, not measured: not here" in shown
    assert "--batch 1,4" in shown
    tables = [line for line in shown.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in tables[:6]}) == 1
    content = json.loads(json.dumps(model_table.record(report())))
    rates = content["contenders"][0]["rates"][0]
    assert (rates["prompt"], rates["batch"]) == ONE
    assert rates["prefill"] == [100.0, 300.0, 200.0]
    assert content["command"] in shown


def test_plots(tmp_path: Path) -> None:
    for path in write(report(), tmp_path):
        root = xml.fromstring(path.read_text(encoding="utf-8"))
        words = [node.text for node in root.iter() if node.tag.endswith("text")]
        assert words[-2:] == ["qcompile", "llama.cpp"]
        assert len([n for n in root.iter() if n.tag.endswith("circle")]) == 3
    assert "a &lt;processor&gt;" in against_batch(report(), "decode")
    with pytest.raises(OptionError):
        write(report(), tmp_path / "nothing")


def test_plots_against_length(tmp_path: Path) -> None:
    found = report(prompts=(512, 1024))
    found.contenders[0].prefill[Size(1024, 1)] = [90.0] * 3
    found.contenders[0].decode[Size(1024, 1)] = [9.0] * 3
    names = [path.name for path in write(found, tmp_path)]
    assert names == ["prefill.svg", "prefill-length.svg", "decode.svg", "decode-length.svg"]
    root = xml.fromstring((tmp_path / "decode-length.svg").read_text(encoding="utf-8"))
    assert len([n for n in root.iter() if n.tag.endswith("circle")]) == 3


# **** the whole ****


def test_measure(file: Path) -> None:
    options = Options(str(file), against=(), prompts=(16,), tokens=3, batches=(2,), rounds=2)
    seen: list[str] = []
    found = measure(options, seen.append)
    (own,) = found.contenders
    assert set(own.prefill) == set(own.decode) == {Size(16, 2)}
    assert all(len(values) == 2 and min(values) > 0 for values in own.prefill.values())
    assert own.load > 0
    assert own.compile > 0
    assert own.weights < file.stat().st_size * 1.5
    assert own.top1 == 1.0
    assert own.kl is not None
    assert own.kl < 1e-8
    assert len(seen) == steps(options)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--tokens", "1"),
        ("--rounds", "0"),
        ("--batch", "1,x"),
        ("--prompt-tokens", "0"),
        ("--dtype", "int8"),
    ],
)
def test_refusals(file: Path, capsys: pytest.CaptureFixture[str], option: str, value: str) -> None:
    assert main(["bench", "model", str(file), option, value]) == 2
    assert option in capsys.readouterr().err


def test_no_such_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "model", "nothing.gguf"]) == 2
    assert "nothing.gguf: no such file" in capsys.readouterr().err
