"""Puts this folder on the import path, so that tests can share what lies in ``support``.

Workers share the cores, so each of them computes on one; torch reads that when it is imported.
"""

from __future__ import annotations

import gc
import os

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# Workers are given a width, which the command line would fit its tables to.
os.environ.pop("COLUMNS", None)


@pytest.fixture(autouse=True, scope="module")
def _left_by_other_modules() -> None:
    """Every compilation collects cycles: do not search what earlier modules left behind."""
    gc.collect()
    gc.freeze()
