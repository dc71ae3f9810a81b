"""What this machine has. The only file of the backend that asks."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os

import torch


@functools.cache
def has_device() -> bool:
    """Whether torch sees a GPU of this vendor."""
    return torch.cuda.is_available() and torch.version.cuda is not None


@functools.cache
def host_arch() -> str | None:
    """The architecture of the present device, or None."""
    if not has_device():
        return None
    major, minor = torch.cuda.get_device_capability()
    return f"sm{major}{minor}"


def takes_ptx(device: torch.device) -> bool:
    """Whether kernels for a device may hold PTX; ROCm calls its devices ``cuda`` too."""
    return device.type == "cuda" and torch.version.cuda is not None


@functools.cache
def missing_triton() -> str | None:
    """Why kernels cannot be compiled here, or None."""
    if importlib.util.find_spec("triton") is None:
        return 'the package triton is not installed (pip install "qcompile[cuda]")'
    return None


def interpreting() -> bool:
    """Whether this process is asked to interpret kernels."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def interprets() -> bool:
    """Whether it does: ``triton`` looks when it is imported, so to be asked later is too late."""
    if missing_triton() or not interpreting():
        return False
    standard = importlib.import_module("triton.language.standard")
    return type(standard.cdiv).__name__ == "InterpretedFunction"
