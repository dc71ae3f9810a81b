"""What a figure was measured on.

Comes in: nothing. Goes out: facts of this machine and versions of the packages that matter.
Always holds: nothing is imported to tell its version, and no device is touched.
"""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


def machine() -> dict[str, object]:
    """Processor, cores that this process may use, threads of torch, memory in bytes, system."""
    return {
        "processor": processor(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "memory": memory(),
        "system": platform.platform(),
    }


def processor() -> str:
    """Name of the processor as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def cores() -> int:
    """Cores that this process may use."""
    allowed = getattr(os, "sched_getaffinity", None)  # Linux alone has it
    return len(allowed(0)) if allowed else os.cpu_count() or 1


def memory() -> int | None:
    """Bytes of memory in all; None where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def version_of(package: str) -> str | None:
    """The installed version of a package, None when it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def versions(*packages: str) -> dict[str, str]:
    """Versions of Python and of those packages that are installed."""
    found = {package: version_of(package) for package in ("qcompile", "torch", *packages)}
    installed = {package: text for package, text in found.items() if text is not None}
    return {"python": platform.python_version(), **installed}
