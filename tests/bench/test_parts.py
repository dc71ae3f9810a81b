"""The benchmarks of repacking, experts and compiling, and the command that writes their tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qcompile.backends.cpu.probe import find_compiler
from qcompile.bench import (
    compiling,
    compiling_table,
    experts,
    holds,
    report,
    report_sections,
    transforms,
)
from qcompile.bench.report_sections import Measured, Settings
from qcompile.cli import main
from qcompile.errors import OptionError

MACHINE: dict[str, object] = {"processor": "a <processor>", "cores": 2, "memory": 2 << 30}
compiled = pytest.mark.skipif(find_compiler() is None, reason="kernels need a C++ compiler")


# **** repacking ****


def repacking(**more: object) -> transforms.Options:
    given: dict[str, object] = {
        "formats": ("q4_k", "iq1_s", "gptq 4-bit"),
        "shape": (64, 512),
        "copies": 2,
        "ggml": "",
        "rounds": 2,
        "threads": 1,
        "urgent": False,
    }
    return transforms.Options(**{**given, **more})  # type: ignore[arg-type]


@compiled
def test_repacking_is_measured() -> None:
    seen: list[str] = []
    found = transforms.measure(repacking(), seen.append)
    assert set(found.rates) == {"q4_k", "iq1_s", "gptq 4-bit"}
    assert {"edge", "pack", "codes", "gguf"} == set(found.rates["q4_k"])
    assert all(len(rates) == 2 for rates in found.rates["q4_k"].values())
    assert "gguf" not in found.rates["gptq 4-bit"]
    assert len(seen) == transforms.steps(found.options)
    text = transforms.text(found)
    assert "QCOMPILE_LLAMA_CPP_PYTHON" in text
    assert json.loads(json.dumps(transforms.record(found)))["rates"]["q4_k"]["edge"]


def test_repacking_is_held_to_numpy_and_ggml() -> None:
    found = transforms.Report(repacking(), MACHINE, "2026-01-02", {"gguf": "0"})
    found.rates["q4_k"] = {"edge": [8e9, 6e9], "pack": [1e9] * 2, "gguf": [2e8] * 2}
    numpy, ggml = transforms.claims(found)
    assert numpy.found == 35.0
    assert numpy.row[-1] == "yes"
    assert ggml.row[-1] == "-"  # not measured is no yes
    found.rates["q4_k"]["ggml"] = [8e9, 8e9]
    assert transforms.claims(found)[1].row[-1] == "no"
    assert "| q4_k | 7.00 | 1.00 | - | 0.20 | 8.00 | 35.0 | 0.88 |" in transforms.markdown(found)
    assert "no" in holds.text(transforms.claims(found))


# **** experts ****


@compiled
def test_experts_are_measured() -> None:
    pytest.importorskip("transformers")
    options = experts.Options(("4-bit g32",), 8, (1, 3), 2, 1, False)
    seen: list[str] = []
    found = experts.measure(options, seen.append)
    assert len(seen) == experts.steps(options)
    kernels = {line.kernel for line in found.lines}
    assert kernels == {"cpu.panel_experts", "cpu.panel_experts_int8"}
    assert all(len(line.ours) == len(line.peer) == 2 for line in found.lines)
    assert {line.tokens for line in found.lines} == {1, 3}
    assert "8 experts" in experts.markdown(found)
    assert "4-bit g32" in experts.text(found)
    json.dumps(experts.record(found))


def test_ratio_of_experts_is_the_median_over_rounds() -> None:
    line = experts.Line("q4_k", "kernel", 1, [1.0, 1.0, 2.0], [3.0, 5.0, 2.0])
    assert line.ratio == 3.0


# **** compiling ****


def growing() -> compiling.Report:
    options = compiling.Options(None, (2, 4, 8), "float32", "exact", 1, 1, False)
    found = compiling.Report(options, MACHINE, "2026-01-02", {"torch": "2.x"})
    for layers in options.layers:
        stages = {
            "trace": [0.1 * layers, 0.1 * layers, 9.0],
            "passes": [0.01 * layers**2],
            "pass canonicalize.linear": [0.01 * layers**2],
            "inductor": [5.0],
            "all": [5.0 + 0.1 * layers],
        }
        found.runs.append(compiling.Run(f"{layers} layers", layers, stages, {"sites": 7 * layers}))
    return found


def test_growth_with_layers() -> None:
    found = growing()
    assert found.exponent("trace") == pytest.approx(1.0)
    assert found.exponent("passes") == pytest.approx(2.0)
    assert found.exponent("inductor") == pytest.approx(0.0)
    assert found.exponent("pack") is None  # below a millisecond
    assert found.a_layer("trace") == pytest.approx(0.1)
    lines = compiling_table.text(found).splitlines()
    assert [line.split()[0] for line in lines[:4]] == [
        "stage",
        "trace",
        "passes",
        "canonicalize.linear",
    ]
    assert lines[-1].endswith("no more than linear")
    for run in found.runs:
        run.stages["all"] = run.stages["passes"]
    assert compiling_table.text(found).endswith("more than linear")
    assert "no more than" not in compiling_table.text(found)
    assert "--layers 2,4,8" in compiling_table.markdown(found)
    json.dumps(compiling_table.record(found))


def test_compiling_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a C++ compiler the graph runs as it is lowered: every stage but Inductor's."""
    pytest.importorskip("transformers")
    monkeypatch.setenv("QCOMPILE_CXX", "none")
    options = compiling.Options(None, (2, 1), "float32", "exact", 1, 1, False)
    found = compiling.measure(options)
    assert [run.layers for run in found.runs] == [1, 2]
    more = found.runs[1]
    for stage in ("open", "open, build, plan", "pack", "trace", "capture", "passes", "all"):
        assert more.seconds(stage) > 0
    passes = [seconds for name, [seconds] in more.stages.items() if name.startswith("pass ")]
    assert sum(passes) == pytest.approx(more.seconds("passes"))
    assert {"pass canonicalize.linear", "pass quantize.swap", "pass lower"} <= set(more.stages)
    assert more.counts == {"sites": 16, "graphs": 2}


# **** the report ****


def measured(settings: Settings) -> Measured:
    return Measured("Title", f"a \\1 table, quick {settings.quick}", "all of it", {"x": 1})


def test_the_report_replaces_what_stands_between_its_markers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in report.SECTIONS:
        monkeypatch.setitem(report.SECTIONS, name, measured)
    page = tmp_path / "README.md"
    first, last = report.markers("large model")
    page.write_text(f"before\n{first}\nold\n{last}\nafter\n", encoding="utf-8")
    given = ["--write", str(page), "--quick", "--only", "large model"]
    more = ["--details", str(tmp_path / "all.md"), "--json", str(tmp_path / "all.json")]
    assert report.main([*given, *more]) == 0
    wanted = f"before\n{first}\na \\1 table, quick True\n{last}\nafter\n"
    assert page.read_text(encoding="utf-8") == wanted
    assert "## Title\n\nall of it" in (tmp_path / "all.md").read_text(encoding="utf-8")
    assert json.loads((tmp_path / "all.json").read_text(encoding="utf-8")) == {
        "large model": {"x": 1}
    }
    assert report.main(given) == 0  # once more changes nothing
    assert page.read_text(encoding="utf-8") == wanted


def test_the_report_needs_every_marker_before_it_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(settings: Settings) -> Measured:
        raise AssertionError("measured")

    for name in report.SECTIONS:
        monkeypatch.setitem(report.SECTIONS, name, never)
    page = tmp_path / "README.md"
    first, last = report.markers("model")
    for text in ("", first, f"{last}\n{first}", f"{first}\n{last}\n{first}\n{last}"):
        page.write_text(text, encoding="utf-8")
        with pytest.raises(OptionError, match="no place for model"):
            report.main(["--write", str(page), "--only", "model"])
    with pytest.raises(OptionError, match="kernels"):
        report.main(["--write", str(page), "--only", "kernel"])
    page.write_text(f"{first}\n{last}\n", encoding="utf-8")
    nowhere = str(tmp_path / "none" / "all.md")
    with pytest.raises(OptionError, match="--details"):
        report.main(["--write", str(page), "--only", "model", "--details", nowhere])


def test_the_readme_has_a_place_for_every_section() -> None:
    readme = Path(__file__).parents[2] / "README.md"
    for name in report_sections.SECTIONS:
        report.require(readme.read_text(encoding="utf-8"), name, readme)


# **** the command line ****


@pytest.mark.parametrize(
    "words",
    [
        ["transforms", "--shape", "4096"],
        ["transforms", "--rounds", "0"],
        ["transforms", "q4k"],
        ["experts", "--tokens", "0"],
        ["compile", "--layers", "two"],
        ["compile", "nothing.gguf"],
        ["kernels", "nothing.gguf"],
        ["kernels", "--shapes", "1x"],
        ["kernels", "--rows", "0"],
        ["kernels", "--kernel", "cpu.panel"],
        ["kernels", "--dtype", "int8"],
    ],
)
def test_refusals(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == 2
    assert words[1] in capsys.readouterr().err
