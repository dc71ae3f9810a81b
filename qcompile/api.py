"""What users call.

Comes in: a model or a path, a scheme, a device. Goes out: a compiled model, a plan, a checkpoint.
Always holds: everything that can be refused is refused before a weight byte moves, and a call that
fails leaves the user's module as it was.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from qcompile import backends, schemes
from qcompile.backends import Backend
from qcompile.binding import check_identity
from qcompile.capture import parameter_names
from qcompile.emit import emitter_of
from qcompile.errors import OptionError, QCompileError
from qcompile.layout import Shape
from qcompile.modules import install_weights, module_sites
from qcompile.options import (
    check_dtype,
    check_module,
    check_policy,
    kept_names,
    opened_checkpoint,
)
from qcompile.passes.select import Policy, require_kernels, select
from qcompile.plans import Plan
from qcompile.schemes import Checkpoint
from qcompile.session import Progress, Session, no_progress
from qcompile.site import Site
from qcompile.spec import is_quantized
from qcompile.target import Target
from qcompile.weight import WeightRef

Model = TypeVar("Model", bound=nn.Module)


def open(path: str | Path, scheme: str = "auto") -> Checkpoint:
    """Open a checkpoint without a model.

    Args:
        path: a GGUF file, one of its shards, or a checkpoint folder.
        scheme: its scheme, or ``auto``.

    Returns:
        the checkpoint: ``tensors`` by the file's own names, each with spec and shape, and
        ``dequantize(name)``, float32 ``[N, K]``, rows as stored.

    Raises:
        SchemeError: the file is missing, damaged or of no known scheme.
    """
    return schemes.open_checkpoint(path, scheme)


def plan(
    model: str | Path | nn.Module,
    device: str = "cpu",
    scheme: str = "auto",
    checkpoint: str | Path | Checkpoint | None = None,
    on_unsupported: Policy = "error",
    emitter: str | None = None,
) -> Plan:
    """Decide which kernel would run each site. No weight is read and no device is touched.

    Args:
        model: a checkpoint's path, a module to be used with ``checkpoint``, or a compiled module.
        device: ``cpu``, ``cuda:sm90``, ``npu:910b``, ...; it need not be present.
        scheme: the checkpoint's scheme, or ``auto``.
        checkpoint: the checkpoint, when ``model`` is a module.
        on_unsupported: what becomes of a site that no kernel accepts.
        emitter: ``inductor`` or ``eager``; the backend's own choice when None.

    Returns:
        the plan; sites without a kernel are part of it and do not raise.
    """
    if isinstance(model, nn.Module) and isinstance(getattr(model, "qcompile", None), Session):
        compiled: Session = model.qcompile  # type: ignore[assignment]
        if checkpoint is None and _same_target(compiled.plan.target, device):
            return compiled.plan
        raise OptionError(
            "plan",
            "the module is already compiled",
            "its own device, and no checkpoint",
            "plan the checkpoint's path, or a fresh module",
        )
    target, backend = _backend(device)
    if isinstance(model, nn.Module):
        opened = opened_checkpoint(checkpoint, scheme)
        catalogue = _catalogue(opened, model, ())
        sites: list[Site] = module_sites(model, catalogue)
        floats = [w for w in catalogue.values() if not is_quantized(w.spec)]
    else:
        opened = schemes.open_checkpoint(model, scheme)
        sites, floats = opened.sites(), opened.floats()
    return _plan(opened, sites, floats, target, backend, on_unsupported, torch.float32, emitter)


def optimize(
    model: Model,
    scheme: str = "auto",
    device: str = "cpu",
    checkpoint: str | Path | Checkpoint | None = None,
    dtype: torch.dtype | None = None,
    emulate: bool = False,
    verify: bool = False,
    *,
    on_unsupported: Policy = "error",
    emitter: str | None = None,
    keep: Iterable[str] = (),
    fullgraph: bool = True,
    progress: Progress = no_progress,
) -> Model:
    """Compile a module so that it runs on a checkpoint's quantized weights.

    The module itself is changed and returned: parameters that the checkpoint quantizes become
    stand-ins without storage, parameters that it stores as floats are loaded, and ``forward`` (and
    with it Hugging Face ``generate``) is compiled on its first call. No float copy of a quantized
    weight is made.

    Args:
        model: any module whose parameters may be on the meta device.
        scheme: the checkpoint's scheme, or ``auto``.
        device: where it runs: ``cpu``, ``cuda``, ``npu``, optionally with an architecture.
        checkpoint: the file or folder with the weights, or what ``qcompile.open`` returned.
        dtype: dtype of activations and of float parameters; None keeps the module's.
        emulate: run on the CPU what was lowered for another device, where the backend can.
        verify: compare every site's kernel with the reference on the stored bytes first.
        on_unsupported: ``error``, or ``dequantize`` for sites that no kernel accepts.
        emitter: ``inductor`` or ``eager``; the backend's own choice when None.
        keep: regular expressions of parameter names that stay as the module has them.
        fullgraph: refuse graph breaks.
        progress: called while packing with a weight's name, bytes done and bytes in all.

    Returns:
        the module; ``model.qcompile.plan`` is its plan.

    Raises:
        OptionError, SchemeError, PlanError, CaptureError, VerifyError: see the message.
    """
    session = session_for(
        model,
        scheme=scheme,
        device=device,
        checkpoint=checkpoint,
        dtype=dtype,
        emulate=emulate,
        on_unsupported=on_unsupported,
        emitter=emitter,
        keep=keep,
        progress=progress,
    )
    if verify:
        from qcompile.verify import verify_session

        verify_session(session)
    install_weights(model, session.catalogue, dtype)
    session.names = parameter_names(model, session.catalogue)
    _install_forward(model, session, fullgraph)
    return model


def load(
    path: str | Path,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    emulate: bool = False,
    verify: bool = False,
    *,
    scheme: str = "auto",
    on_unsupported: Policy = "error",
    emitter: str | None = None,
    progress: Progress = no_progress,
) -> tuple[nn.Module, Any]:
    """A checkpoint's own Hugging Face model, compiled, and its tokenizer.

    Args:
        path: a GGUF file or a checkpoint folder.
        device: where it runs.
        dtype: dtype of the activations; float32 when None.
        emulate, verify, scheme, on_unsupported, emitter, progress: as for ``optimize``.

    Returns:
        the model (``forward`` and ``generate``) and the tokenizer.
    """
    _backend(device)
    check_dtype(dtype)
    checkpoint = schemes.open_checkpoint(path, scheme)
    model, tokenizer = checkpoint.build(dtype or torch.float32)
    compiled = optimize(
        model,
        checkpoint.scheme,
        device,
        checkpoint,
        dtype,
        emulate,
        verify,
        on_unsupported=on_unsupported,
        emitter=emitter,
        progress=progress,
    )
    return compiled, tokenizer


def session_for(
    model: nn.Module,
    *,
    scheme: str = "auto",
    device: str = "cpu",
    checkpoint: str | Path | Checkpoint | None = None,
    dtype: torch.dtype | None = None,
    emulate: bool = False,
    on_unsupported: Policy = "error",
    emitter: str | None = None,
    keep: Iterable[str] = (),
    progress: Progress = no_progress,
    bind_floats: bool = False,
) -> Session:
    """Everything that is decided about a module before it is traced. The module is not changed."""
    target, backend = _backend(device)
    check_module(model)
    check_dtype(dtype)
    if isinstance(getattr(model, "qcompile", None), Session):
        raise OptionError(
            type(model).__name__,
            "already compiled by qcompile",
            "a module that is not",
            "build a fresh module",
        )
    if emulate:
        raise OptionError(
            "emulate=True",
            f"the backend {target.kind} has no emulator",
            "a backend that emulates its operators",
            "leave emulate out",
        )
    opened = opened_checkpoint(checkpoint, scheme)
    catalogue = _catalogue(opened, model, keep)
    floats = [w for w in catalogue.values() if not is_quantized(w.spec)]
    activations = dtype or _float_dtype(model)
    made = _plan(
        opened,
        module_sites(model, catalogue),
        floats,
        target,
        backend,
        on_unsupported,
        activations,
        emitter,
    )
    require_kernels(made)
    names = parameter_names(model, catalogue)
    return Session(
        catalogue, backend, made, names, activations, on_unsupported, progress, bind_floats
    )


# **** parts of the above ****


def _backend(device: str) -> tuple[Target, Backend]:
    target = Target.parse(device)
    backend = backends.load(target.kind)
    return (target if target.arch else backend.default_target()), backend


def _plan(
    opened: Checkpoint,
    sites: Iterable[Site],
    floats: Iterable[WeightRef],
    target: Target,
    backend: Backend,
    policy: Policy,
    dtype: torch.dtype,
    emitter: str | None,
) -> Plan:
    check_policy(policy)
    chosen = emitter or backend.compiler()
    emitter_of(chosen)
    entries = select(sites, backend.KERNELS, target, policy, dtype)
    source, notes = str(opened.path), opened.notes()
    return Plan(target, opened.scheme, source, entries, tuple(floats), chosen, notes)


def _same_target(target: Target, device: str) -> bool:
    asked = Target.parse(device)
    return asked.kind == target.kind and asked.arch in (None, target.arch)


def _catalogue(
    opened: Checkpoint, model: nn.Module, keep: Iterable[str]
) -> Mapping[str, WeightRef]:
    shapes = _shapes(model)
    kept = kept_names(model, shapes, keep)
    catalogue = opened.catalogue(_without_aliases(model, shapes, opened.tensors), kept)
    check_identity(model, catalogue, str(opened.path), kept)
    return catalogue


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


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of all parameters; a tied parameter appears under each of its names."""
    return {n: tuple(p.shape) for n, p in model.named_parameters(remove_duplicate=False)}


def _float_dtype(model: nn.Module) -> torch.dtype:
    for parameter in model.parameters():
        if parameter.is_floating_point():
            return parameter.dtype
    return torch.float32


def _install_forward(model: nn.Module, session: Session, fullgraph: bool) -> None:
    """Compile ``forward`` in place, so that callers, hooks and ``generate`` all run it."""
    original = model.forward

    @functools.cache
    def compiled() -> tuple[Callable[..., Any], Callable[..., Any]]:
        # On the first call: dynamo takes a second to import, which loading need not wait for.
        from qcompile.dynamo import compile_forward

        return compile_forward(original, session, fullgraph)

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        run, settings = compiled()
        with torch.no_grad(), settings(), _own_errors():
            return run(*args, **kwargs)

    model.forward = forward
    # object.__setattr__: a module would look for parameters in it.
    object.__setattr__(model, "qcompile", session)


@contextlib.contextmanager
def _own_errors() -> Iterator[None]:
    """Let an error of ours through as it is, not wrapped into one of dynamo's."""
    try:
        yield
    except QCompileError:
        raise
    except Exception as failure:
        inner = getattr(failure, "inner_exception", None)
        if isinstance(inner, QCompileError):
            raise inner from None
        raise
