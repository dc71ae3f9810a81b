"""What this machine has. The only file of the backend that asks."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

import torch

# Prefixes of the names that devices report.
_ARCHITECTURES = {"Ascend910_93": "910_93", "Ascend910B": "910b", "Ascend310P": "310p"}


@functools.cache
def has_device() -> bool:
    """Whether the vendor's package loads and sees a device."""
    if importlib.util.find_spec("torch_npu") is None:
        return False
    try:
        importlib.import_module("torch_npu")
    except (ImportError, OSError):  # the package without the vendor's libraries
        return False
    return bool(_devices().is_available())


def _devices() -> Any:
    """What the package adds to torch."""
    return getattr(torch, "npu")  # noqa: B009 - torch alone has no such attribute


@functools.cache
def host_arch() -> str | None:
    """The architecture of the present device, or None."""
    if not has_device():
        return None
    name = str(_devices().get_device_name(0))
    return next((arch for prefix, arch in _ARCHITECTURES.items() if name.startswith(prefix)), None)
