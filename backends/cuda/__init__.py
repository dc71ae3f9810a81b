"""The CUDA backend: kernels of other packages where they are installed, Triton kernels of our own.

Comes in: sites. Goes out: kernels over the layouts that they read.
Always holds: importing it asks nothing of the machine and imports no vendor package; without a
device graphs run only where Triton interprets its kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from qcompile.backends.cuda import edges as _edges  # noqa: F401 - registers layouts and edges
from qcompile.backends.cuda import emulation, marlin_experts, marlin_layout, probe, schemas
from qcompile.backends.cuda.humming import Humming
from qcompile.backends.cuda.marlin import MarlinLinear
from qcompile.backends.cuda.triton_embedding import TritonEmbedding
from qcompile.backends.cuda.triton_experts import TritonExperts
from qcompile.backends.cuda.triton_linear import TritonLinear
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
        TritonLinear(packed, dtype),
        TritonEmbedding(packed, dtype),
        TritonExperts(packed, dtype),
    )


KERNELS: tuple[Kernel, ...] = kernels(torch.float16)


def default_target() -> Target:
    """The present device, or the kind alone."""
    return Target("cuda", probe.host_arch())


def default_dtype(target: Target) -> torch.dtype:
    """bfloat16, whose range fits every model; float16 before sm80, which has nothing else."""
    return torch.float16 if target.arch == "sm75" else torch.bfloat16


def compiler() -> str:
    """The emitter for lowered graphs: Inductor fuses what is left between kernels, on a device."""
    return "inductor" if probe.has_device() else "eager"


def device() -> torch.device:
    """Where weights and activations are: the present device, or the CPU."""
    return torch.device("cuda" if probe.has_device() else "cpu")


def prepare() -> None:
    """Define the operators, so that graphs can hold their calls."""
    from qcompile.backends.cuda import operators as _operators  # noqa: F401 - registers them


def describe(wide: bool) -> str:
    """One line for the plan; see ``emulation``."""
    return emulation.describe(wide)


def emulated(call: Callable[..., Any], target: Target, wide: bool) -> Callable[..., Any]:
    """A lowered graph that runs on CPU tensors; see ``emulation``."""
    return emulation.emulated(call, target)
