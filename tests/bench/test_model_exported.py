"""The exported model among the contenders: its process, failure, tables and pictures."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest

from qcompile.backends.cpu.probe import find_compiler
from qcompile.bench import model, model_table
from qcompile.bench.exported_worker import Worker
from qcompile.bench.model import Figures, Options, Report, Size, _each, _load, _Run, measure, steps
from qcompile.bench.model_plots import write
from qcompile.bench.model_process import BenchError, started
from qcompile.bench.peers import EXPORTED, own_contenders
from qcompile.bench.report_sections import SECTIONS, Settings
from qcompile.bench.synthetic import Shape
from qcompile.bench.synthetic import write as write_synthetic
from qcompile.cli import main

MACHINE: dict[str, object] = {"processor": "a <processor>", "cores": 2, "memory": 2 << 30}
ONE, FOUR = Size(512, 1), Size(512, 4)
compiled = pytest.mark.skipif(find_compiler() is None, reason="code is saved by a C++ compiler")


def report(batches: tuple[int, ...] = (1, 4)) -> Report:
    """Figures as wide as those of fast machines; every ratio can be done in the head."""
    own = Figures("qcompile", "ours", compile=20.0)
    own.prefill = {ONE: [10000.0, 30000.0, 20000.0], FOUR: [40000.0] * 3}
    own.decode = {ONE: [100.0, 300.0, 200.0], FOUR: [400.0] * 3}
    exported = Figures(EXPORTED, "saved", compile=25.0, weights=10**6)
    exported.prefill = {ONE: [20000.0, 60000.0, 60000.0]}
    exported.decode = {ONE: [150.0, 450.0, 100.0]}
    peer = Figures("torchao-int4", "theirs")
    peer.prefill = {ONE: [10000.0, 10000.0, 10000.0], FOUR: [10000.0] * 3}
    peer.decode = {ONE: [100.0, 100.0, 100.0], FOUR: [100.0] * 3}
    contenders = [own, exported, peer]
    options = Options("model.gguf", batches=batches, threads=2, exported=True)
    return Report(options, MACHINE, "2026-01-02", contenders, [])


# **** tables and pictures ****


def test_text_has_ratios_in_a_table_of_their_own() -> None:
    lines = model_table.text(report()).splitlines()
    assert max(map(len, lines)) <= 100
    words = [" ".join(line.split()) for line in lines]
    assert words[2] == ("qcompile, exported 512 1 60000 20000 to 60000 150.0 100.0 to 450.0")
    at = words.index("prompt batch ours is exported is")
    assert words[at + 1] == "qcompile 512 1 2.00x, 1.50x"
    assert words[at + 2] == "torchao-int4 512 1 2.00x, 2.00x 6.00x, 1.50x"
    assert words[at + 3] == "qcompile, exported 512 4 not measured"
    assert words[at + 4] == "torchao-int4 512 4 4.00x, 4.00x"
    assert words[-1] == f"{EXPORTED}: measured with one sequence only"


def test_markdown_has_one_more_column() -> None:
    found = report()
    shown = model_table.markdown(found)
    assert "| ours is | exported is |" in shown
    assert "| 2.00x, 2.00x | 6.00x, 1.50x |" in shown
    assert f"- {EXPORTED}: saved" in shown
    assert f"| {EXPORTED} | 0.00 | 25.0 | 1 |" in shown
    assert "--exported`" in shown
    tables = [line for line in shown.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in tables[:8]} == {10}
    content = json.loads(json.dumps(model_table.record(found)))
    assert content["contenders"][1]["name"] == EXPORTED
    assert content["contenders"][1]["rates"][0]["decode"] == [150.0, 450.0, 100.0]
    assert content["options"]["exported"] is True


def test_plots(tmp_path: Path) -> None:
    for path in write(report(), tmp_path):
        root = xml.fromstring(path.read_text(encoding="utf-8"))
        words = [node.text for node in root.iter() if node.tag.endswith("text")]
        assert words[-3:] == ["qcompile", EXPORTED, "torchao-int4"]
        assert len([n for n in root.iter() if n.tag.endswith("circle")]) == 5


# **** the process ****


def test_a_failed_export_raises_and_leaves_nothing(tmp_path: Path) -> None:
    contender = own_contenders("float32", "exact", exported=True)[1]
    options = Options(str(tmp_path / "nothing.gguf"), exported=True)
    found = report()
    with started(contender, 1, {"TMPDIR": str(tmp_path)}) as process:
        runs = [_Run(process, Figures(contender.name, contender.note))]
        with pytest.raises(BenchError, match=r"nothing\.gguf") as caught:
            _each(runs, found, lambda what: None, "loading", lambda run: _load(run, options))
        assert len(list(tmp_path.glob("qcompile-exported-*"))) == 1
    assert f"{EXPORTED}, load: ExportError" in str(caught.value)
    assert "--against" not in str(caught.value)
    assert found.missing == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["transformers", "torch._dynamo", "torch._inductor"])
def test_no_figures_with_a_compiler_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, sys)
    with pytest.raises(RuntimeError, match=name):
        Worker(tmp_path).memory()


@compiled
def test_measure(tmp_path: Path) -> None:
    file = tmp_path / "small.gguf"
    write_synthetic(
        file, Shape(layers=1, hidden=256, inner=512, heads=4, vocabulary=300, context=512)
    )
    options = Options(
        str(file), against=(), prompts=(16,), tokens=3, rounds=2, compared=16, exported=True
    )
    seen: list[str] = []
    found = measure(options, seen.append)
    own, exported = found.contenders
    assert (own.name, exported.name) == ("qcompile", EXPORTED)
    assert set(exported.prefill) == set(exported.decode) == {Size(16, 1)}
    rates = (*exported.prefill.values(), *exported.decode.values())
    assert all(len(values) == 2 and min(values) > 0 for values in rates)
    assert exported.compile > 1.0  # seconds, of a C++ compiler at least
    assert exported.load > 0
    assert 0 < exported.weights < file.stat().st_size * 1.5
    # That there is a peak says that the process had no transformers, see above.
    assert 0 < exported.baseline < exported.peak < own.peak
    assert exported.top1 == 1.0
    assert exported.kl is not None
    assert exported.kl < 1e-8
    assert "transformers" not in exported.versions
    assert len(seen) == steps(options)


@pytest.mark.parametrize("quick", [True, False])
def test_the_report_measures_it_unless_quick(monkeypatch: pytest.MonkeyPatch, quick: bool) -> None:
    seen: list[Options] = []

    def keep(options: Options, step: object) -> Report:
        seen.append(options)
        return report()

    monkeypatch.setattr(model, "measure", keep)
    settings = Settings(quick, urgent=False, gemma="model.gguf", large="large.gguf", folder="")
    for name in ("model", "large model"):
        SECTIONS[name](settings)
    assert [options.exported for options in seen] == [not quick] * 2


def test_a_device_whose_code_cannot_be_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["bench", "model", str(tmp_path), "--exported", "--device", "cuda:sm90"]
    assert main(given) == 2
    assert "--exported: code for cuda:sm90 cannot be saved" in capsys.readouterr().err
