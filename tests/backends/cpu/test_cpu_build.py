"""The native library is built once, mended when damaged, and done without when it cannot be."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.weights import random_weight, reference

from qcompile import backends
from qcompile.backends.cpu.build import load_library
from qcompile.backends.cpu.probe import find_compiler, variant
from qcompile.errors import LowerError
from qcompile.kernel import Reject
from qcompile.passes.select import select
from qcompile.site import EmbeddingSite, LinearSite, Site
from qcompile.spec import AffineSpec
from qcompile.target import Target

REPOSITORY = Path(__file__).resolve().parents[3]
USE_IT = """
import torch
from qcompile.backends.cpu.build import load_library
path = load_library()
codes, scale = torch.full((16, 8), 3, dtype=torch.uint8), torch.ones(16, 1)
blob = torch.ops.qcompile_cpu.panel_pack(codes, scale, None, [16, 8, 4, 8, 0, 0], 8)
shape = [16, 8, 4, 8, 0, 0]
table = torch.zeros(16, dtype=torch.int8)
y = torch.ops.qcompile_cpu.panel_linear(torch.ones(2, 8), blob, table, None, shape, 0)
assert y.tolist() == [[-40.0] * 16] * 2, y
print(path)
"""


def compiler_at(path: Path, body: str) -> Path:
    """A compiler that writes down its arguments before it does as ``body`` says."""
    path.write_text(f'#!/bin/sh\necho "$@" >> {path}.calls\n{body}\n', encoding="utf-8")
    path.chmod(0o755)
    return path


def calls_of(compiler: Path) -> list[str]:
    """What a compiler was asked to do, apart from saying its version."""
    lines = Path(f"{compiler}.calls").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line != "--version"]


def run_with(compiler: Path, cache: Path) -> Path:
    """Load the library in a fresh process; the file it was loaded from."""
    environment = os.environ | {
        "QCOMPILE_CACHE": str(cache),
        "QCOMPILE_CXX": str(compiler),
        "PYTHONPATH": str(REPOSITORY),
    }
    command = [sys.executable, "-W", "error", "-c", USE_IT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


@pytest.fixture
def quick(tmp_path: Path) -> Path:
    """The machine's compiler, told to be quick."""
    return compiler_at(tmp_path / "quick-cxx", f'exec {find_compiler()} "$@" -O0')


def test_a_cache_entry_is_not_compiled_again(tmp_path: Path, quick: Path) -> None:
    built = load_library()
    entry = tmp_path / "kernels" / built.name
    entry.parent.mkdir()
    shutil.copy(built, entry)
    assert run_with(quick, tmp_path) == entry
    assert calls_of(quick) == []


def test_a_damaged_cache_entry_is_built_again(tmp_path: Path, quick: Path) -> None:
    entry = tmp_path / "kernels" / load_library().name
    entry.parent.mkdir()
    entry.write_bytes(b"\x7fELF, but not for long")
    assert run_with(quick, tmp_path) == entry
    made = sorted(call.split(" -o ")[1].split()[0] for call in calls_of(quick))
    folder = REPOSITORY / "backends" / "cpu" / "csrc"
    common = [f.stem for f in folder.glob("*.cpp") if not f.stem.startswith("kernels_")]
    sources = (*common, f"kernels_{variant()}", f"kernels_few_{variant()}")
    assert made == sorted([*(f"{name}.o" for name in sources), "out.so"])
    assert entry.stat().st_size > 10_000
    assert sorted(file.suffix for file in entry.parent.iterdir()) == [".lock", ".so"]


def test_what_the_compiler_says_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = compiler_at(tmp_path / "bad-cxx", "echo 'panel.h:7: out of patience' >&2; exit 1")
    monkeypatch.setenv("QCOMPILE_CXX", str(failing))
    monkeypatch.setenv("QCOMPILE_CACHE", str(tmp_path))
    with pytest.raises(LowerError, match=r"panel\.h:7: out of patience") as caught:
        load_library.__wrapped__()
    assert str(failing) in caught.value.found
    assert "QCOMPILE_CXX=none" in caught.value.fix
    assert not list((tmp_path / "kernels").glob("*.so"))


@pytest.mark.parametrize("named", ["none", "no-such-compiler"])
def test_no_compiler(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QCOMPILE_CXX", named)
    backend = backends.load("cpu")
    weight = reference(random_weight(AffineSpec(4, 32, "symmetric"), 16, 64))
    sites: list[Site] = [LinearSite("proj", weight), EmbeddingSite("embed", weight)]
    chosen = select(sites, backend.KERNELS, Target("cpu", "avx2"))
    names = [entry.kernel.name for entry in chosen if entry.kernel]
    assert names == ["cpu.decoded_linear", "cpu.decoded_embedding"]  # they share a weight
    for kernel, site in zip(backend.KERNELS[:2], sites, strict=True):
        answer = kernel.accepts(site, Target("cpu", "avx2"))
        assert isinstance(answer, Reject)
        assert named in answer.reason
    assert backend.compiler() == "eager"
    with pytest.raises(LowerError, match=named):
        load_library.__wrapped__()
