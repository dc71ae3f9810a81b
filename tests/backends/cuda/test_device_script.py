"""The script for a GPU, on sizes that the interpreter manages."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qcompile.backends.cuda import probe
from qcompile.backends.cuda.clock import measure

COMMAND = [sys.executable, "-m", "qcompile.bench.device"]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_every_section_at_tiny_sizes(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [*COMMAND, "--tiny", "--json", str(file)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    content = json.loads(file.read_text())
    assert content["failures"] == []
    assert content["facts"]["device"] == "cpu"
    rows = content["correct"]
    assert all(row["ok"] for row in rows)
    assert {row["kernel"] for row in rows} >= {"cuda.triton_linear", "cuda.triton_embedding"}
    assert {row["spec"] for row in content["linear"]} == {"w4 g128", "q4_k"}
    assert {row["what"].split()[0] for row in content["ceilings"]} == {"copy", "product"}
    assert "0 results wrong" in done.stdout


@pytest.mark.skipif(probe.has_device(), reason="there is a device")
def test_without_a_device_it_says_so() -> None:
    done = subprocess.run(COMMAND, capture_output=True, text=True, timeout=600)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "no CUDA device" in done.stderr
    assert "--tiny" in done.stderr


def test_times_without_a_device() -> None:
    ran = []
    found = measure([lambda: ran.append(1), lambda: ran.append(2)], torch.device("cpu"))
    assert ran == [1]
    assert 0 < found.fastest == found.median
