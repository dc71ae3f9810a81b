"""Runs every file of ``interpreted`` in a process that was started for Triton to interpret."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

JOBS = sorted((Path(__file__).parent / "interpreted").glob("test_*.py"))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.stem)
def test_interpreted(job: Path) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    env |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    quiet = ["-o", "addopts=", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command = [sys.executable, "-m", "pytest", *quiet, str(job)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-6000:]
    assert re.search(r"\d+ passed", said), said[-2000:]
    assert not re.search(r"\d+ skipped", said), said[-2000:]


def test_there_are_jobs() -> None:
    assert len(JOBS) >= 3
