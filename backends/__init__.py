"""Devices: one folder each.

Comes in: the kind of a target. Goes out: the backend of that kind.
Always holds: a backend is imported when it is asked for and not before; passes never import one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from qcompile.errors import OptionError, nearest
from qcompile.kernel import NUMERICS, Kernel, Numerics
from qcompile.target import Target

if TYPE_CHECKING:
    from torch import fx

    from qcompile.passes import Pass

_BUILT_IN = ("cpu", "cuda", "npu")


class Backend(Protocol):
    """What a backend's module offers."""

    @property
    def KERNELS(self) -> tuple[Kernel, ...]:
        """Its kernels, in the order a plan asks them."""

    def default_target(self) -> Target:
        """The target that a bare kind means: the present device, or the kind alone."""

    def compiler(self) -> str:
        """The emitter for lowered graphs: ``inductor``, ``eager`` or one that it registers."""

    def prepare(self) -> None:
        """Build or load what the kernels need. Idempotent; called before a graph is lowered."""


@runtime_checkable
class ByDtype(Protocol):
    """A backend whose kernels pack weights for one dtype of activations."""

    def kernels(self, dtype: torch.dtype) -> tuple[Kernel, ...]:
        """The kernels for activations of this dtype; those of ``KERNELS`` for some dtype."""

    def default_dtype(self, target: Target) -> torch.dtype:
        """The dtype of activations where nobody names one."""


@runtime_checkable
class Emulates(Protocol):
    """A backend that can run its lowered graphs on a CPU, with its operators emulated."""

    def emulated(self, call: Callable[..., Any], target: Target, wide: bool) -> Callable[..., Any]:
        """A lowered graph that takes CPU tensors.

        Args:
            call: the graph.
            target: the device whose rules the operators keep.
            wide: compute in float32 throughout, so that only what packing lost is seen.
        """

    def describe(self, wide: bool) -> str:
        """One line for the plan: what is emulated, and how."""


@runtime_checkable
class Places(Protocol):
    """A backend whose device has memory of its own."""

    def device(self) -> torch.device:
        """Where weights and activations are; the CPU where the device is absent."""


@runtime_checkable
class HasFast(Protocol):
    """A backend with kernels of the numerics ``fast``: they round activations on the way."""

    @property
    def FAST_KERNELS(self) -> tuple[Kernel, ...]:
        """Those kernels, asked before the others."""


@runtime_checkable
class HasPasses(Protocol):
    """A backend that rewrites lowered graphs further."""

    def passes(self, numerics: Numerics) -> tuple[Pass, ...]:
        """Those rewrites, in order, that these numerics allow."""


@runtime_checkable
class SavesCode(Protocol):
    """A backend that can compile a lowered graph to a file."""

    def code_facts(self) -> Mapping[str, str]:
        """What such a file depends on: it runs only where these are the same."""

    def save_code(
        self, graph_module: fx.GraphModule, inputs: Sequence[torch.Tensor], path: Path
    ) -> None:
        """Compile a graph to a file; its tensors by ``get_attr`` stay outside.

        Args:
            graph_module: a lowered graph.
            inputs: fake tensors, one for each placeholder.
            path: the file, to which others of its name and other suffixes may be added.
        """

    def load_code(
        self, path: Path, constants: Mapping[str, torch.Tensor]
    ) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
        """The callable in a file, on constants by the names of their nodes."""


def kernels_for(
    backend: Backend, dtype: torch.dtype, numerics: Numerics = "exact"
) -> tuple[Kernel, ...]:
    """The kernels of a backend for activations of a dtype.

    Raises:
        OptionError: numerics are unknown, or the backend has no kernels of that kind.
    """
    if numerics not in NUMERICS:
        raise OptionError(
            f"numerics={numerics!r}",
            "unknown",
            f"one of {', '.join(NUMERICS)}",
            f"name one of them{nearest(str(numerics), NUMERICS)}",
        )
    kernels = backend.kernels(dtype) if isinstance(backend, ByDtype) else backend.KERNELS
    if numerics == "exact":
        return kernels
    if not isinstance(backend, HasFast):
        raise OptionError(
            'numerics="fast"',
            f"{getattr(backend, '__name__', 'the backend').rpartition('.')[2]} has no such kernels",
            "a backend whose kernels can round activations",
            'leave numerics out, or use device="cpu"',
        )
    return (*backend.FAST_KERNELS, *kernels)


def default_dtype(backend: Backend, target: Target) -> torch.dtype:
    """The dtype of activations where nobody names one."""
    return backend.default_dtype(target) if isinstance(backend, ByDtype) else torch.float32


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
