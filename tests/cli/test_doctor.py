"""What the doctor says is so."""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from support.zoo import DATA, ROOT

from qcompile import backends, schemes
from qcompile.backends.cpu import build, probe
from qcompile.cli import doctor, main
from qcompile.cli.survey import Package, packages
from qcompile.target import ARCHITECTURES

PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def facts(capsys: pytest.CaptureFixture[str], code: int = 0) -> dict[str, object]:
    assert main(["doctor", "--json"]) == code
    said = capsys.readouterr()
    assert said.err == ""
    found: dict[str, object] = json.loads(said.out)
    return found


def test_all_is_well_here(capsys: pytest.CaptureFixture[str]) -> None:
    found = facts(capsys)
    assert found["problems"] == []
    assert found["schemes"] == list(schemes.names())
    devices = found["devices"]
    assert isinstance(devices, list)
    assert [device["kind"] for device in devices] == list(ARCHITECTURES)
    assert devices[0]["present"]
    assert devices[0]["target"] == str(backends.load("cpu").default_target())
    assert {device["failure"] for device in devices} == {""}
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "qcompile " in text
    assert f"cpu         {devices[0]['target']}, graphs go to " in text


def test_the_library_is_the_one_that_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    if probe.find_compiler() is None:
        pytest.skip("no C++ compiler")
    path = build.load_library()
    native = facts(capsys)["native"]
    assert isinstance(native, dict)
    assert (native["library"], native["built"]) == (str(path), True)


def test_without_a_compiler_it_says_what_that_costs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QCOMPILE_CXX", "none")
    assert main(["doctor"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "no C++ compiler was found" in text
    assert "aten's int4 product where activations are bfloat16; others decode" in text
    assert "graphs go to eager" in text
    assert main(["plan", str(DATA / "gguf-q2_k.gguf"), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert {site["runs_as"] for site in plan["sites"]} == {
        "cpu.decoded_linear",
        "reference.embedding",
    }
    assert plan["emitter"] == "eager"


@pytest.mark.parametrize("asked", ["generic", "avx2", ""])
def test_the_variant_is_the_one_that_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    monkeypatch.setenv("QCOMPILE_CPU_ISA", asked)
    found = facts(capsys)["native"]
    assert isinstance(found, dict)
    assert found["variant"] == probe.variant()
    assert asked != "generic" or found["variant"] == "generic"
    assert set(found["features"]) <= probe.cpu_flags()


def test_on_arm_it_says_how_far_the_kernels_are_proven(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if probe.find_compiler() is None:
        pytest.skip("no C++ compiler")
    monkeypatch.delenv("QCOMPILE_CPU_ISA", raising=False)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(probe, "cpu_flags", lambda: frozenset({"asimd", "asimddp"}))
    assert main(["doctor"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "neon (the processor has asimd, asimddp); tested under emulation" in text
    assert "speed not measured" in text


def test_every_extra_has_its_packages_and_its_costs() -> None:
    table = PROJECT.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = re.findall(r"^(\w+) = ", table, re.MULTILINE)
    assert {"hf", "cuda", "demo", "completion"} <= set(extras)
    found = {p.extra for p in packages() if not p.required and p.extra}
    assert found == set(extras) - {"test", "docs", "bench"}
    assert all(p.costs for p in packages() if not p.required)
    required = PROJECT.partition("\ndependencies = [")[2].partition("]")[0]
    names = re.findall(r'"([a-z]+)', required)
    assert [p.name for p in packages() if p.required] == names


def test_what_is_said_to_work_without_transformers_does() -> None:
    file = DATA / "gguf-q2_k.gguf"
    code = (
        "import sys; sys.modules['transformers'] = None; import qcompile; from qcompile.cli import "
        f"main; assert main(['plan', {str(file)!r}]) == 0; assert main(['inspect', {str(file)!r}])"
        f" == 0; assert main(['plan', {str(DATA / 'gptq-w2-g32-asym')!r}, '--verify']) == 0; "
        f"sys.exit(main(['generate', {str(file)!r}, '--prompt', 'x']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "transformers" in done.stderr
    assert 'pip install "qcompile[hf]"' in done.stderr


@pytest.mark.parametrize(
    ("version", "wanted", "fits"),
    [
        ("2.13.0+cpu", ">=2.11,<2.14", True),
        ("2.14.0", "<2.14,>=2.11", False),
        ("2.9", ">=2.11", False),
        ("5.24", ">=5.24.0", True),
        ("1.0.post1", "==1.0", True),
        ("1.0", "!=1", False),
        ("3", "", True),
    ],
)
def test_versions(version: str, wanted: str, fits: bool) -> None:
    assert Package("p", version, wanted, True).fits is fits


def test_problems_are_told_and_make_the_exit_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    old = [replace(p, version="1.0") if p.name == "torch" else p for p in packages()]
    monkeypatch.setattr(doctor, "packages", lambda: old)
    assert main(["doctor"]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "torch: 1.0 is installed, " in text
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    monkeypatch.setenv("QCOMPILE_CACHE", str(blocked))

    def broken(kind: str) -> backends.Backend:
        raise ImportError(f"no {kind}")

    monkeypatch.setattr("qcompile.backends.load", broken)
    problems = facts(capsys, code=1)["problems"]
    assert isinstance(problems, list)
    assert len(problems) == 5
    assert "backend npu: ImportError: no npu" in problems
    assert "cache folder" in problems[-1]


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_it_fits_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["doctor"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= columns


def test_it_is_quick_and_loads_no_model_library() -> None:
    code = (
        "import sys, time, torch; begin = time.process_time(); from qcompile.cli import main; "
        "code = main(['doctor']); print(time.process_time() - begin, file=sys.stderr); "
        "heavy = {'transformers', 'accelerate', 'gguf', 'torch._inductor'} & set(sys.modules); "
        "assert not heavy, heavy; sys.exit(code)"
    )
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stderr) < 1.5  # of processor time, torch's own import left out
    assert time.monotonic() - begin < 60
