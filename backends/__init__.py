"""Devices: one folder each.

Comes in: the kind of a target. Goes out: the backend of that kind.
Always holds: a backend is imported when it is asked for and not before; passes never import one.
"""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import Protocol

from qcompile.errors import OptionError
from qcompile.kernel import Kernel
from qcompile.target import Target

_BUILT_IN = ("cpu", "cuda", "npu")


class Backend(Protocol):
    """What a backend's module offers."""

    @property
    def KERNELS(self) -> tuple[Kernel, ...]:
        """Its kernels, in the order a plan asks them."""

    def default_target(self) -> Target:
        """The target that a bare kind means: the present device, or the kind alone."""

    def compiler(self) -> str:
        """The emitter for lowered graphs: ``inductor`` or ``eager``."""

    def prepare(self) -> None:
        """Build or load what the kernels need. Idempotent; called before a graph is lowered."""


def load(kind: str) -> Backend:
    """The backend for targets of this kind.

    Raises:
        OptionError: no backend has this name.
    """
    if kind in _BUILT_IN:
        return importlib.import_module(f"qcompile.backends.{kind}")
    for entry in entry_points(group="qcompile.backends"):
        if entry.name == kind:
            return entry.load()  # type: ignore[no-any-return]
    raise OptionError(
        f"backend {kind!r}",
        "unknown",
        f"one of {', '.join(_BUILT_IN)}, or one that an installed package brings",
        "name a known kind of device",
    )
