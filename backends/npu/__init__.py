"""The Ascend backend: the operators of torch_npu, planned and packed without a device.

Comes in: sites. Goes out: kernels over the layouts that the operators read.
Always holds: importing it asks nothing of the machine and imports no vendor package; without a
device graphs run only where emulation was asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from qcompile.backends.npu import edges as _edges  # noqa: F401 - registers layouts and edges
from qcompile.backends.npu import words as _words  # noqa: F401 - registers direct edges
from qcompile.backends.npu.embedding import PackedEmbedding
from qcompile.backends.npu.emulation import Mode, emulating
from qcompile.backends.npu.emulator import define, describe
from qcompile.backends.npu.experts import PackedExperts
from qcompile.backends.npu.graphs import EMITTERS
from qcompile.backends.npu.layouts import DTYPES, HALVES, ORDERS
from qcompile.backends.npu.linear import PackedLinear, arch_of
from qcompile.backends.npu.probe import has_device, host_arch
from qcompile.backends.npu.w8a8 import QuantLinear
from qcompile.emit import register_emitter
from qcompile.kernel import Kernel
from qcompile.target import Target


def kernels(dtype: torch.dtype) -> tuple[Kernel, ...]:
    """The kernels for activations of a dtype; those for one that no operator takes say so."""
    packed = dtype if dtype in DTYPES else torch.float16
    orders = [order for order in (*ORDERS, *HALVES) if order.dtype == packed]
    return (
        *(PackedLinear(order, dtype) for order in orders),
        QuantLinear(dtype),
        *(PackedEmbedding(order) for order in orders if order.rows_first),
        PackedExperts(packed, dtype),
    )


KERNELS: tuple[Kernel, ...] = kernels(torch.float16)
for _name, _emitter in EMITTERS.items():
    register_emitter(_name, _emitter)


def default_target() -> Target:
    """The present device, or the kind alone."""
    return Target("npu", host_arch())


def default_dtype(target: Target) -> torch.dtype:
    """bfloat16, whose range fits every model; float16 on the 310P, which has nothing else."""
    return torch.float16 if target.arch == "310p" else torch.bfloat16


def compiler() -> str:
    """The emitter for lowered graphs."""
    return "eager"


def device() -> torch.device:
    """Where weights and activations are: the present device, or the CPU."""
    return torch.device("npu" if has_device() else "cpu")


def prepare() -> None:
    """Define the operators, so that graphs can hold their calls."""
    define()


def emulated(call: Callable[..., Any], target: Target, wide: bool) -> Callable[..., Any]:
    """A lowered graph that runs on CPU tensors; see ``emulator``."""
    mode = Mode(arch_of(target), wide)

    def run(*args: Any) -> Any:
        with emulating(mode):
            return call(*args)

    return run


__all__ = ["KERNELS", "describe", "emulated", "kernels"]
