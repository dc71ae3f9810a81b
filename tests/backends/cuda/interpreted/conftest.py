"""These tests run in processes of their own: ``test_interpreter_jobs.py`` starts them."""

from __future__ import annotations

import os

if not os.environ.get("TRITON_INTERPRET"):
    collect_ignore_glob = ["test_*.py"]
