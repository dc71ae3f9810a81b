"""Memory that ``qcompile generate`` takes at its peak, over what its libraries take alone.

A file's weights are in memory once. What comes on top does not grow with the file: modules of
torch, transformers and Inductor, the tokenizer, the compiled graphs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.large import Size, write_large
from support.zoo import gemma

MIB = 1 << 20
# Peak over the file's size where the file is large; where it is small, bytes beside the file: of
# those, modules that are imported after torch and transformers take 140 MiB, the tokenizer 68.
# Measured: 344 MiB in all.
LARGE_RATIO, GEMMA_FIXED = 1.5, 370 * MIB

_SCRIPT = """
import sys
import torch, transformers
def status(key):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))
before = status("VmRSS")
from qcompile.cli import main
code = main(["generate", sys.argv[1], "--prompt", "The history of", "--tokens", "8"])
print("MEMORY", before, status("VmHWM"), file=sys.stderr)
raise SystemExit(code)
"""


def growth(path: Path, cache: Path) -> int:
    """Peak of a process that generates, less what ``import torch, transformers`` takes; bytes.

    Args:
        path: the file to generate with.
        cache: an empty folder for Inductor: compiling takes more than loading what was compiled.
    """
    if not Path("/proc/self/status").exists():
        pytest.skip("needs /proc to read the peak")
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(path)],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    figures = next(line for line in done.stderr.splitlines() if line.startswith("MEMORY"))
    before, peak = map(int, figures.split()[1:])
    return peak - before


def test_a_large_model_takes_little_more_than_its_file(tmp_path: Path) -> None:
    if os.environ.get("QCOMPILE_LARGE") != "1":
        pytest.skip("writes and compiles a model of a billion parameters: set QCOMPILE_LARGE=1")
    path = write_large(tmp_path / "large.gguf", Size())
    try:
        ratio = growth(path, tmp_path / "cache") / path.stat().st_size
    finally:
        path.unlink()
    assert ratio <= LARGE_RATIO, f"{ratio:.2f} times the file"


def test_gemma_takes_its_file_and_a_fixed_part(tmp_path: Path) -> None:
    path = gemma()
    fixed = growth(path, tmp_path) - path.stat().st_size
    assert fixed <= GEMMA_FIXED, f"{fixed / MIB:.0f} MiB beside the file"
