"""The CUDA backend: kernels of other packages where they are installed.

Comes in: sites. Goes out: kernels over the layouts that they read.
Always holds: importing it asks nothing of the machine and imports no vendor package.
"""

from __future__ import annotations

import torch

from qcompile.backends.cuda import marlin_experts, marlin_layout, schemas
from qcompile.backends.cuda.humming import Humming
from qcompile.backends.cuda.marlin import MarlinLinear
from qcompile.kernel import Kernel
from qcompile.target import Target


def kernels(dtype: torch.dtype) -> tuple[Kernel, ...]:
    """The kernels for activations of a dtype; those for one that no operator takes say so."""
    packed = dtype if dtype in schemas.HALVES else torch.float16
    orders = [order for order in marlin_layout.ORDERS if order.dtype == packed]
    return (
        *(MarlinLinear(order, dtype) for order in orders),
        marlin_experts.MarlinExperts(packed, dtype),
        Humming(),
    )


KERNELS: tuple[Kernel, ...] = kernels(torch.float16)


def default_target() -> Target:
    """The kind alone: nothing is probed."""
    return Target("cuda")


def default_dtype(target: Target) -> torch.dtype:
    """bfloat16, whose range fits every model; float16 before sm80, which has nothing else."""
    return torch.float16 if target.arch == "sm75" else torch.bfloat16


def compiler() -> str:
    """The emitter for lowered graphs."""
    return "eager"


def prepare() -> None:
    """Nothing has to be built."""
