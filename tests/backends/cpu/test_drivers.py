"""Programs in ``drivers`` hold every kernel to sums in double: on this machine, and on ARM.

For ARM the sources are compiled with the backend's own commands, and qemu runs them: on a processor
that has the dot product instructions, and on one that lacks them.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from qcompile.backends.cpu import build
from qcompile.backends.cpu.probe import find_compiler

DRIVERS = Path(__file__).parent / "drivers"
CASES = {"linear": 150, "gated": 300, "repack": 300, "attention": 30}
CROSS = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64"
PROCESSORS = {"neon": "max", "generic": "cortex-a53"}
LIBRARIES = Path(torch.__file__).parent / "lib"


def do(command: list[str], folder: Path) -> str:
    """What a command prints; it has to succeed."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, " ".join(command) + "\n" + done.stdout + done.stderr
    return done.stdout


def driver(compiler: str, name: str, objects: list[str], folder: Path) -> str:
    """A driver, linked with the kernels."""
    source = str(DRIVERS / f"{name}.cpp")
    flags = ["-std=c++17", "-O1", f"-I{build._SOURCES}"]
    do([compiler, *flags, source, *objects, "-o", name], folder)
    return str(folder / name)


@pytest.fixture(params=sorted(PROCESSORS))
def arm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A variant for ARM, which the backend's commands are now about."""
    missing = [tool for tool in (CROSS, EMULATOR) if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"there is no {' and no '.join(missing)}")
    variant: str = request.param
    monkeypatch.setattr(build, "variant", lambda: variant)
    return variant


def kernels(compiler: str) -> list[list[str]]:
    """The commands that compile what needs no torch."""
    sources = [source for source in build._sources() if source.name not in build._BINDINGS]
    return [build._compilation(compiler, source) for source in sources]


@pytest.mark.parametrize("name", sorted(CASES))
def test_on_this_machine(name: str, tmp_path: Path) -> None:
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    library = [str(build.load_library()), f"-L{LIBRARIES}", "-ltorch", "-ltorch_cpu", "-lc10"]
    # Not the newer kind of path, which does not serve the library's own needs.
    paths = [f"-Wl,-rpath,{LIBRARIES}", "-Wl,--disable-new-dtags"]
    made = driver(compiler, name, [*library, *paths], tmp_path)
    assert f"{CASES[name]} cases, 0 wrong" in do([made, "1", str(CASES[name])], tmp_path)


def test_emulated(arm: str, tmp_path: Path) -> None:
    for command in kernels(CROSS):
        do(command, tmp_path)
    objects = ["-static", *(file.name for file in tmp_path.glob("*.o"))]
    run = [EMULATOR, "-cpu", PROCESSORS[arm]]
    for name, cases in CASES.items():
        made = driver(CROSS, name, objects, tmp_path)
        assert f"{cases} cases, 0 wrong" in do([*run, made, "2", str(cases)], tmp_path)
    if arm == "generic":
        return
    # What was tested did use instructions that an older processor lacks.
    old = [EMULATOR, "-cpu", PROCESSORS["generic"], str(tmp_path / "linear"), "2", "1"]
    assert subprocess.run(old, capture_output=True, check=False).returncode != 0


def test_all_sources_are_for_arm_too(arm: str, tmp_path: Path) -> None:
    if arm == "generic":
        pytest.skip("the sources that include torch's headers know no variant")
    for source in (source for source in build._sources() if source.name in build._BINDINGS):
        do([*build._compilation(CROSS, source), "-fsyntax-only"], tmp_path)


def test_clang_takes_the_kernels(tmp_path: Path) -> None:
    if (clang := shutil.which("clang++")) is None:
        pytest.skip("there is no clang++")
    for command in kernels(clang):
        do([*command, "-fsyntax-only"], tmp_path)
