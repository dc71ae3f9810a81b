"""Puts this folder on the import path, so that tests can share what lies in ``support``.

Workers share the cores, so each of them computes on one; torch reads that when it is imported.
"""

from __future__ import annotations

import gc
import importlib.util
import os

import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# Workers are given a width, which the command line would fit its tables to.
os.environ.pop("COLUMNS", None)

# Tests that are interpreted run in processes of their own: test_interpreter_jobs.py starts them.
collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") else ["backends/cuda/interpreted/*"]
# What they share needs Triton.
_NEED_TRITON = ("interpreted", "plain_bfloat16", "plain_lines")
collect_ignore = (
    [f"support/{name}.py" for name in _NEED_TRITON]
    if importlib.util.find_spec("triton") is None
    else []
)


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """Random inputs are those of the last run: no bound breaks at one draw in a thousand."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def _left_by_other_modules() -> None:
    """Every compilation collects cycles: do not search what earlier modules left behind."""
    gc.collect()
    gc.freeze()
