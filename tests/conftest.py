"""Puts this folder on the import path, so that tests can share what lies in ``support``.

Workers share the cores, so each of them computes on one; torch reads that when it is imported.
"""

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
