"""Whether, and how, the vendor's operators are emulated.

Comes in: a mode, for as long as a graph runs. Goes out: the mode to the operators that run.
Always holds: outside ``emulating`` an operator on CPU tensors is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from qcompile.errors import LowerError


@dataclass(frozen=True)
class Mode:
    """How operators are emulated.

    Attributes:
        arch: whose rules hold.
        wide: whether to compute in float32 throughout.
    """

    arch: str
    wide: bool = False


_mode: ContextVar[Mode | None] = ContextVar("qcompile_npu_mode", default=None)


@contextmanager
def emulating(mode: Mode) -> Iterator[None]:
    """Let CPU tensors through the vendor's operators."""
    token = _mode.set(mode)
    try:
        yield
    finally:
        _mode.reset(token)


def current(operator: str) -> Mode:
    """The mode that an operator is called in; an error outside ``emulating``."""
    mode = _mode.get()
    if mode is None:
        raise LowerError(
            f"torch.ops.npu.{operator}",
            "CPU tensors: no Ascend device runs this graph",
            "a device with torch_npu, or the emulator",
            "pass emulate=True, or run on a machine with an Ascend device",
        )
    return mode


def check(operator: str, reason: str | None) -> None:
    """Raise where a rule is broken."""
    if reason is not None:
        raise LowerError(
            f"torch.ops.npu.{operator}",
            reason,
            "a call that the device takes",
            "report this: a kernel accepted a site and put a wrong call into the graph",
        )


def unknown(operator: str, given: Mapping[str, object]) -> None:
    """Arguments that no kernel of ours passes are not emulated."""
    for name, value in given.items():
        unset = value is None or (isinstance(value, (int, float)) and value == 0)
        check(operator, None if unset else f"{name} is not emulated")


def judged(x: torch.Tensor, dtype: torch.dtype, mode: Mode) -> torch.Tensor:
    """x as the rules shall see it: in float32 mode with the dtype that a device would get."""
    return x.to(device="meta", dtype=dtype) if mode.wide else x
