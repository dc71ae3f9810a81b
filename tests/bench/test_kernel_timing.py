"""The kernels' benchmark: its weights, its workers, its arithmetic, its tables and pictures."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import xml.etree.ElementTree as xml
from pathlib import Path
from typing import Any

import pytest
import torch

from qcompile.bench import chart, formats, holds, kernel_plots, kernel_table
from qcompile.bench.kernel_cases import Case, cases, cases_of_file, chosen, format_of, kernels_of
from qcompile.bench.kernel_peers import BASELINE, PEERS, baseline, limits, own, peers
from qcompile.bench.kernel_run import Line, Options, Report, measure, ratio, steps
from qcompile.bench.model_process import started
from qcompile.bench.peers import PACKAGES, WORKERS, Missing
from qcompile.bench.synthetic import Shape
from qcompile.bench.synthetic import write as write_synthetic
from qcompile.bench.workers.rounds import Built, LinearWorker, copies_for, timed_calls
from qcompile.bench.workers.serve import Refused
from qcompile.errors import OptionError
from qcompile.spec import AffineSpec

CASE = Case("linear", "q4_k", 64, 256)
ROWS = (1, 8, 64, 512)


def options(**more: object) -> Options:
    given: dict[str, object] = {
        "device": "cpu",
        "kernels": ("cpu.panel_linear",),
        "cases": (CASE,),
        "rows": ROWS,
        "against": ("ggml",),
        "dtype": "bfloat16",
        "rounds": 2,
        "seconds": 0.01,
        "rotated": 1 << 20,
        "limit": 1.0,
        "threads": 1,
        "urgent": False,
    }
    return Options(**{**given, **more})  # type: ignore[arg-type]


def report() -> Report:
    """Ours takes 1 ms, then 3; torch 3 ms, then 6; ggml twice as long as ours."""
    machine = {"processor": "a <processor>", "cores": 2, "memory": 2 << 30}
    made = Report(options(), machine, "2026-01-02", {"torch": "2.x"}, {"bfloat16": 4e11})
    for rows in ROWS:
        for name, mine, times in (
            ("cpu.panel_linear", True, [[1e-3], [3e-3]]),
            (BASELINE, False, [[3e-3], [6e-3]]),
            ("ggml", False, [[2e-3], [6e-3]]),
        ):
            made.lines.append(Line(name, mine, CASE, rows, 9216, 0.004, "how", times))
        made.reads[CASE, rows] = [9216 / 0.9e-3, 9216 / 2.1e-3]
    made.missing = [Missing("torchao", "pip install torchao")]
    made.refused = [("torch", "q4_k", "no kernel for q4_k"), ("ggml", "M=512", "too slow")]
    return made


# **** weights ****


@pytest.mark.parametrize("name", formats.names())
def test_values_of_a_format_are_finite(name: str) -> None:
    weight = formats.stored(name, (32, 512))
    values = weight.dequantize()
    assert values.isfinite().all()
    assert 0 < values.std() < 2
    again = formats.stored(name, (32, 512))
    assert all(torch.equal(part, again.parts[key]) for key, part in weight.parts.items())


def test_a_spec_is_a_format() -> None:
    weight = formats.stored("uint3 g64 zero", (4, 128))
    assert weight.spec == AffineSpec(3, 64, "zero", torch.float16)
    assert format_of(weight.spec) == "uint3 g64 zero"
    with pytest.raises(OptionError, match="q4_k"):
        formats.stored("q4k", (4, 256))


def test_cases_of_a_file(tmp_path: Path) -> None:
    write_synthetic(tmp_path / "m.gguf", Shape(8, 256, 512, 4, 2, 300, 512))
    found, left = cases_of_file(str(tmp_path / "m.gguf"), "cpu")
    assert Case("linear", "q4_k", 512, 256) in found
    assert Case("embedding", "q6_k", 300, 256) in found
    assert len(found) == len(set(found))
    assert left == []


def test_kernels() -> None:
    exact, fast = chosen("cpu", (), ("exact",)), chosen("cpu", (), ("fast",))
    assert {k.kind for k in exact} == {"linear", "embedding"}
    assert not {k.name for k in exact} & {k.name for k in fast}
    assert {k.name for k in (*exact, *fast)} < {k.name for k in kernels_of("cpu")}
    [one] = chosen("cpu", ("reference.linear",), ())
    assert cases((one,), ("q4_k",), ((64, 256),)) == [CASE]
    with pytest.raises(OptionError, match=r"cpu\.panel_linear"):
        chosen("cpu", ("cpu.panel",), ())
    with pytest.raises(OptionError, match="exact, fast"):
        chosen("cpu", (), ("quick",))


# **** workers ****


def test_a_round_goes_round_the_copies() -> None:
    calls: list[tuple[int, int]] = []
    built = Built(lambda copy, rows: calls.append((copy, rows)), 3, 100, 0.0, "note")
    worker = LinearWorker({"linear": lambda *given: built}, {})
    worker.prepare("linear", "q4_k", 1, 1, 1)
    for _ in range(4):
        assert len(worker.time(8, seconds=0.0, limit=1.0)["seconds"]) == 1
    assert calls == [(0, 8), (0, 8), (1, 8), (2, 8), (0, 8)]  # the first warms up
    with pytest.raises(Refused, match="no kernel for embeddings"):
        worker.prepare("embedding", "q4_k", 1, 1, 1)
    assert copies_for(100, 250) == 3
    assert copies_for(1000, 250) == 2
    assert len(timed_calls(lambda: None, 0.0)) == 1


def test_a_call_that_takes_too_long_is_refused() -> None:
    import time

    built = Built(lambda copy, rows: time.sleep(0.01 * rows), 2, 100, 0.0, "")
    worker = LinearWorker({"linear": lambda *given: built}, {})
    worker.prepare("linear", "q4_k", 1, 1, 1)
    worker.time(1, 0.0, 0.05)
    with pytest.raises(Refused, match="64 would take too long"):
        worker.time(64, 0.0, 0.05)
    with pytest.raises(Refused, match="8 rows take"):
        worker.time(8, 0.0, 0.05)


def test_workers_start_without_qcompile(tmp_path: Path) -> None:
    """An interpreter that cannot import qcompile runs them, and none of them shadows a package."""
    code = (
        "import sys, runpy; sys.modules['qcompile'] = None; "
        f"sys.argv = ['start.py', 'linear_torch', 'bf16']; "
        f"runpy.run_path({str(WORKERS / 'start.py')!r}, run_name='__main__')"
    )
    ask = json.dumps({"do": "prepare", "kind": "linear", "format": "x", "n": 8, "k": 32,
                      "rotated": 1})  # fmt: skip
    found = subprocess.run(
        [sys.executable, "-c", code], input=ask + "\n", capture_output=True, text=True, check=True
    )
    assert json.loads(found.stdout)["copies"] == 2


def test_every_peer_has_a_worker() -> None:
    for peer in PEERS:
        assert (WORKERS / f"{peer.worker[0]}.py").is_file()
        assert bool(peer.imports) == bool(peer.install) == bool(peer.variable)


def test_a_peer_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = tmp_path / "python"
    empty.write_text('#!/bin/sh\necho "ModuleNotFoundError: torchao" >&2\nexit 1\n')
    empty.chmod(0o755)
    monkeypatch.setenv(PACKAGES, str(empty))
    (found,) = peers(["torchao"])
    assert isinstance(found, Missing)
    assert "pip install torchao" in found.reason
    assert PACKAGES in found.reason
    with pytest.raises(OptionError, match="auto-round-lib"):
        peers(["autoround"])


@pytest.mark.parametrize("kind", ["aten", "dynamic"])
def test_torch_workers_compute_what_they_say(kind: str) -> None:
    from qcompile.bench.workers import linear_torch

    with torch.no_grad():
        built = getattr(linear_torch, kind)("4-bit g32", 64, 128, 1)
        assert built.error < 2e-2
        if kind == "aten":
            assert linear_torch.aten("8-bit row", 64, 128, 1).error < 1e-2
        with pytest.raises(Refused, match="no kernel for q4_k"):
            getattr(linear_torch, kind)("q4_k", 64, 256, 1)


def test_measure() -> None:
    """Ours, torch and memory, in processes of their own; a peer that is not there is told."""
    embedded = Case("embedding", "q8_0", 128, 64)
    names = ("cpu.panel_linear", "cpu.panel_embedding")
    given = options(
        kernels=names, cases=(CASE, embedded), rows=(1, 8), against=("torch",), dtype="float32"
    )
    seen: list[str] = []
    found = measure(given, seen.append)
    assert len(seen) == steps(given)
    rows = {(line.contender, line.case.kind, line.rows) for line in found.lines}
    for rows_of in (1, 8):
        assert ("cpu.panel_linear", "linear", rows_of) in rows
        assert (BASELINE, "linear", rows_of) in rows
        assert ("cpu.panel_embedding", "embedding", rows_of) in rows
        assert (BASELINE, "embedding", rows_of) in rows
    assert all(line.error < 1e-5 for line in found.lines if line.own)
    assert all(len(line.rounds) == 2 for line in found.lines)
    assert ("torch", str(CASE), "no kernel for q4_k") in found.refused
    assert "cpu.panel_linear" in kernel_table.text(found)


def test_the_worker_of_a_kernel_refuses_in_its_words() -> None:
    with started(own("cpu.panel_embedding", "cpu", "float32"), 1) as process:
        given: dict[str, Any] = {"kind": "embedding", "n": 32, "k": 256, "rotated": 1}
        answer = process.ask("prepare", format="gptq act-order", **given)
        assert "act-order" in answer["refused"]
    with started(limits(), 1) as process:
        assert process.ask("read", nbytes=1 << 16, seconds=0.0)["bytes"] == 1 << 16
    assert baseline().name == BASELINE


# **** arithmetic and tables ****


def test_ratios_are_medians_of_rounds() -> None:
    found = report()
    line = found.lines[0]
    assert line.seconds == 2e-3
    assert found.against(line, BASELINE) == 2.5  # of 3 and of 2
    assert found.of_bandwidth(line) == pytest.approx((0.9 + 0.7) / 2)
    best = found.best(line)
    assert best is not None
    assert best.contender == "ggml"
    assert ratio(line, best) == 2.0
    assert line.work == 2 * 64 * 256
    embedded = Line("x", True, Case("embedding", "q8_0", 100, 32), 8, 3400, 0, "", [[1e-3]])
    assert (embedded.read, embedded.work) == (272, 0)


def test_text_markdown_and_json() -> None:
    found = report()
    lines = kernel_table.text(found).splitlines()
    assert lines[2] == "q4_k 64 x 256"
    assert " ".join(lines[4].split()).startswith("cpu.panel_linear 1 2.00 1.00 to 3.00")
    narrow = kernel_table.text(found, 80).partition("ggml: how")[0].splitlines()[2:]
    assert max(map(len, narrow)) <= 80
    assert any("torchao, not measured: pip install torchao" in line for line in lines)
    assert any("ggml, M=512: too slow" in line for line in lines)
    assert not any("no kernel for" in line for line in lines)
    shown = kernel_table.markdown(found)
    assert "2026-01-02, a <processor>, 2 cores, 2 GiB; 1 threads each" in shown
    content = json.loads(json.dumps(kernel_table.record(found)))
    assert content["command"] in shown
    again = kernel_table.restored(content)
    assert kernel_table.markdown(again) == shown
    assert [line.rounds for line in again.lines] == [line.rounds for line in found.lines]


def test_what_holds() -> None:
    claims = {(c.work.rpartition("M=")[2], c.against): c for c in holds.of_kernels(report())}
    assert claims["1", "read bandwidth"].row[-1] == "yes"
    assert claims["8", "best 4-bit peer"].found == 2.0
    assert claims["512", "torch bf16 F.linear"].found == 2.5
    alone = report()
    alone.lines = [line for line in alone.lines if line.own]
    assert {c.row[-1] for c in holds.of_kernels(alone) if c.against != "read bandwidth"} == {"-"}


# **** pictures ****


def test_pictures(tmp_path: Path) -> None:
    found = report()
    paths = kernel_plots.write(found, tmp_path)
    assert [path.name for path in paths] == ["roofline.svg", "rows-64x256-q4_k.svg"]
    for path in paths:
        root = xml.fromstring(path.read_text(encoding="utf-8"))
        words = [node.text or "" for node in root.iter() if node.tag.endswith("text")]
        assert len([n for n in root.iter() if n.tag.endswith("circle")]) == 12
        assert any("ggml" in word for word in words)
        assert any("a <processor>" in word for word in words)


def test_names_do_not_overlap() -> None:
    placed = sorted(chart.apart([100.0, 101.0, 430.0, 431.0, 50.0]))
    assert all(b - a >= 15.9 for a, b in itertools.pairwise(placed))
    assert placed[-1] <= chart.HEIGHT
    axis = chart.logarithmic([3.0, 700.0], "x")
    assert (axis.low, axis.high) == (1.0, 1000.0)
    assert axis.share(1000.0) == pytest.approx(1.0)
