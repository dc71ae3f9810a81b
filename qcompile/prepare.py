"""Everything that is decided about a module before it is traced.

Comes in: a module, a checkpoint, a device, a policy. Goes out: a plan, or a session with one.
Always holds: no weight byte is read and the module is not changed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from qcompile import backends
from qcompile.backends import Backend, Emulates, default_dtype, kernels_for
from qcompile.binding import check_identity
from qcompile.buffers import held_buffers
from qcompile.capture import parameter_names
from qcompile.conv1d import refuse_conv1d
from qcompile.emit import emitter_of
from qcompile.errors import OptionError
from qcompile.kernel import Numerics
from qcompile.layout import Shape
from qcompile.modules import module_sites
from qcompile.options import (
    check_dtype,
    check_emulation,
    check_module,
    check_policy,
    kept_names,
    opened_checkpoint,
)
from qcompile.passes.select import Policy, require_kernels, select
from qcompile.plans import Plan
from qcompile.schemes import Checkpoint
from qcompile.session import Emulation, Progress, Session, no_progress
from qcompile.site import Site
from qcompile.spec import is_quantized
from qcompile.target import Target
from qcompile.weight import WeightRef, same_floats

_BROKEN = "qcompile_interrupted"


def session_for(
    model: nn.Module,
    *,
    scheme: str = "auto",
    device: str = "cpu",
    checkpoint: str | Path | Checkpoint | None = None,
    dtype: torch.dtype | None = None,
    emulate: Emulation = False,
    on_unsupported: Policy = "error",
    emitter: str | None = None,
    keep: Iterable[str] = (),
    numerics: Numerics = "exact",
    progress: Progress = no_progress,
    bind_floats: bool = False,
    in_place: bool = False,
) -> Session:
    """The session of a module; arguments are those of ``optimize``, and:

    Args:
        bind_floats: see ``Session``.
        in_place: the checkpoint is the module itself: parameters that it does not name stay.
    """
    target, backend = backend_of(device)
    check_fresh(model)
    check_dtype(dtype)
    said = _emulation(backend, target, emulate)
    opened = opened_checkpoint(checkpoint, scheme)
    catalogue = catalogue_of(opened, model, keep, in_place)
    refuse_conv1d(model, catalogue)
    if bind_floats:
        _refuse_buffers(model, catalogue)
    floats = [w for w in catalogue.values() if not is_quantized(w.spec)]
    if in_place:
        floats = opened.floats()
    activations, operands = dtype or _float_dtype(model), None
    if emulate == "float32":
        activations, operands = torch.float32, narrow_dtype(dtype)
    made = make_plan(
        opened,
        module_sites(model, catalogue),
        floats,
        target,
        backend,
        on_unsupported,
        operands or activations,
        emitter,
        numerics,
    )
    require_kernels(made)
    names = parameter_names(model, catalogue)
    return Session(
        catalogue,
        backend,
        replace(made, emulation=said),
        names,
        activations,
        on_unsupported,
        progress,
        bind_floats,
        emulate=emulate,
        operands=operands,
    )


def session_of(
    plan: Plan,
    *,
    policy: Policy = "error",
    emulate: Emulation = False,
    progress: Progress = no_progress,
) -> Session:
    """A session of a checkpoint's plan without its model: enough to measure its sites.

    Args:
        plan: a plan made from headers for the backend's own dtype of activations.
        policy: the policy that it was made with.
        emulate, progress: as for ``optimize``.

    Raises:
        OptionError: the backend has no emulator.
        PlanError: a site has no kernel.
    """
    require_kernels(plan)
    backend = backends.load(plan.target.kind)
    said = _emulation(backend, plan.target, emulate)
    dtype = plan_dtype(backend, plan.target, None)
    return Session(
        {entry.site.weight.name: entry.site.weight for entry in plan.entries},
        backend,
        replace(plan, emulation=said),
        {},
        torch.float32 if emulate == "float32" else dtype,
        policy,
        progress,
        emulate=emulate,
        operands=narrow_dtype(dtype) if emulate == "float32" else None,
    )


def narrow_dtype(dtype: torch.dtype | None) -> torch.dtype:
    """The dtype that weights are packed for where activations stay float32."""
    return torch.float16 if dtype in (None, torch.float32) else dtype


def _emulation(backend: Backend, target: Target, emulate: Emulation) -> str:
    """What the plan says of emulation. Raises OptionError where a backend has none."""
    check_emulation(emulate)
    if not emulate:
        return ""
    if isinstance(backend, Emulates):
        return backend.describe(emulate == "float32")
    raise OptionError(
        f"emulate={emulate!r}",
        f"the backend {target.kind} has no emulator",
        "a backend that emulates its operators",
        "leave emulate out",
    )


def mark_broken(model: nn.Module) -> None:
    """Remember that quantizing a module's own weights was interrupted."""
    object.__setattr__(model, _BROKEN, True)


def check_fresh(model: object) -> None:
    """Raise OptionError unless ``model`` is a module that was not compiled before."""
    check_module(model)
    if getattr(model, _BROKEN, False):
        raise OptionError(
            type(model).__name__,
            "quantizing its weights was interrupted; some are gone",
            "a module whose weights all have values",
            "build the module again",
        )
    if isinstance(getattr(model, "qcompile", None), Session):
        raise OptionError(
            type(model).__name__,
            "already compiled by qcompile",
            "a module that is not",
            "build a fresh module",
        )


def backend_of(device: str) -> tuple[Target, Backend]:
    """The target that a text means, and its backend."""
    target = Target.parse(device)
    backend = backends.load(target.kind)
    return (target if target.arch else backend.default_target()), backend


def plan_dtype(backend: Backend, target: Target, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of activations to plan for, where no module shows one."""
    check_dtype(dtype)
    return dtype or default_dtype(backend, target)


def make_plan(
    opened: Checkpoint,
    sites: Iterable[Site],
    floats: Iterable[WeightRef],
    target: Target,
    backend: Backend,
    policy: Policy,
    dtype: torch.dtype,
    emitter: str | None,
    numerics: Numerics = "exact",
) -> Plan:
    """Choose a kernel for every site. The arguments are those of ``qcompile.plan``."""
    check_policy(policy)
    chosen = emitter or backend.compiler()
    emitter_of(chosen)
    entries = select(sites, kernels_for(backend, dtype, numerics), target, policy, dtype)
    source, notes = str(opened.path), opened.notes()
    made = Plan(target, opened.scheme, source, entries, tuple(floats), chosen, notes)
    return replace(made, numerics=numerics)


def catalogue_of(
    opened: Checkpoint, model: nn.Module, keep: Iterable[str] = (), in_place: bool = False
) -> Mapping[str, WeightRef]:
    """Weights by canonical parameter name, and by buffer; for the arguments see ``session_for``."""
    shapes = shapes_of(model)
    kept = kept_names(model, shapes, keep)
    buffers: dict[str, WeightRef] = {}
    if in_place:
        kept = [name for name in shapes if name not in opened.tensors]
    else:
        buffers = held_buffers(opened, model)
        kept = [*kept, *_copies(model, opened.tensors), *buffers]
    catalogue = opened.catalogue(_without_aliases(model, shapes, opened.tensors), kept)
    check_identity(model, catalogue, str(opened.path), kept)
    return {**catalogue, **buffers}


def _refuse_buffers(model: nn.Module, catalogue: Mapping[str, WeightRef]) -> None:
    """Raise where the module's own buffers would be used instead of the checkpoint's."""
    parameters = shapes_of(model)
    held = [name for name in catalogue if name not in parameters]
    if held:
        raise OptionError(
            'torch.compile(backend="qcompile")',
            f"the checkpoint holds the buffer {held[0]}, which a graph cannot fill",
            "a checkpoint of parameters",
            "use qcompile.optimize(module, ...)",
        )


def _without_aliases(
    model: nn.Module, shapes: Mapping[str, Shape], tensors: Collection[str]
) -> dict[str, Shape]:
    """Leave out further names of a shared parameter that the file stores under another one."""
    stored = {id(p) for n, p in model.named_parameters(remove_duplicate=False) if n in tensors}
    return {
        name: shape
        for name, shape in shapes.items()
        if name in tensors or id(model.get_parameter(name)) not in stored
    }


def _copies(model: nn.Module, tensors: Mapping[str, WeightRef]) -> list[str]:
    """Further names of a shared parameter under which the checkpoint stores the same floats again.

    Many tools write a tied head a second time. Only where that is so are the two read.
    """
    first: dict[int, str] = {}
    copies = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name not in tensors:
            continue
        known = first.setdefault(id(parameter), name)
        if known != name and same_floats(tensors[known], tensors[name]):
            copies.append(name)
    return copies


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of all parameters; a tied parameter appears under each of its names."""
    return {n: tuple(p.shape) for n, p in model.named_parameters(remove_duplicate=False)}


def _float_dtype(model: nn.Module) -> torch.dtype:
    for parameter in model.parameters():
        if parameter.is_floating_point():
            return parameter.dtype
    return torch.float32
