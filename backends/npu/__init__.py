"""The npu backend: it has no kernels yet, so its plans say so for every site.

Comes in: sites. Goes out: nothing. Always holds: no vendor package is imported.
"""

from __future__ import annotations

from qcompile.kernel import Kernel
from qcompile.target import Target

KERNELS: tuple[Kernel, ...] = ()


def default_target() -> Target:
    """The kind alone: nothing is probed."""
    return Target("npu")


def compiler() -> str:
    """The emitter for lowered graphs."""
    return "eager"


def prepare() -> None:
    """Nothing has to be built."""
