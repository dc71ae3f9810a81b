"""Lowered graphs on CPU tensors: Triton's interpreter runs the kernels.

Comes in: a graph, the target whose tiles it takes. Goes out: a callable.
Always holds: Triton decides when it is imported whether it interprets, so a process that was not
started for it gets an error and never another kernel.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any

from qcompile.backends.cuda import probe
from qcompile.backends.cuda.configs import DEFAULT_ARCH
from qcompile.errors import OptionError
from qcompile.target import Target

# Whose tiles an interpreted run takes.
arch: contextvars.ContextVar[str] = contextvars.ContextVar(
    "qcompile_cuda_arch", default=DEFAULT_ARCH
)


def describe(wide: bool) -> str:
    """One line for the plan: what runs, and how.

    Raises:
        OptionError: this process cannot interpret.
    """
    reason = probe.missing_triton()
    if reason is None and not probe.interprets():
        reason = "TRITON_INTERPRET was not set when this process imported triton"
    if reason is not None:
        raise OptionError(
            "emulate for cuda",
            reason,
            "a process in which Triton interprets its kernels on the CPU",
            "start it with TRITON_INTERPRET=1 in its environment",
        )
    how = "in float32 throughout" if wide else "with the device's rounding"
    return f"emulated: Triton's interpreter runs the kernels on the CPU, {how}"


def emulated(call: Callable[..., Any], target: Target) -> Callable[..., Any]:
    """A lowered graph that runs on CPU tensors."""
    from qcompile.backends.cuda.interpreter import enable_bfloat16

    enable_bfloat16()

    def run(*args: Any) -> Any:
        token = arch.set(target.arch or DEFAULT_ARCH)
        try:
            return call(*args)
        finally:
            arch.reset(token)

    return run
