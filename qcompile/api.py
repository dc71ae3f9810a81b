"""What users call.

Comes in: a model or a path, a scheme, a device. Goes out: a compiled model, a plan, a checkpoint.
Always holds: everything that can be refused is refused before a weight byte moves, and a call that
fails leaves the user's module as it was.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from qcompile import schemes
from qcompile.capture import parameter_names
from qcompile.conv1d import quantized_conv1d
from qcompile.errors import OptionError
from qcompile.experts import one_node_a_layer
from qcompile.forward import install_forward
from qcompile.kernel import Numerics
from qcompile.memory import uncollected
from qcompile.modules import install_weights, module_sites, packed_modules
from qcompile.options import check_dtype, kept_names, opened_checkpoint
from qcompile.passes.select import Policy, require_kernels
from qcompile.plans import Plan
from qcompile.prepare import (
    backend_of,
    catalogue_of,
    check_fresh,
    make_plan,
    mark_broken,
    narrow_dtype,
    plan_dtype,
    session_for,
    shapes_of,
)
from qcompile.progress import Reporting, reporter
from qcompile.register import described
from qcompile.schemes import Checkpoint
from qcompile.session import Emulation, Progress, Session, no_progress
from qcompile.site import Site
from qcompile.spec import is_quantized
from qcompile.target import Target

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from qcompile.quantizers import Options

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
        OptionError: the scheme is unknown.
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
    dtype: torch.dtype | None = None,
    numerics: Numerics = "exact",
) -> Plan:
    """Decide which kernel would run each site. No weight is read and no device is touched.

    Args:
        model: a checkpoint's path, a module to be used with ``checkpoint``, or a compiled module.
        device: ``cpu``, ``cuda:sm90``, ``npu:910b``, ...; it need not be present.
        scheme: the checkpoint's scheme, or ``auto``.
        checkpoint: the checkpoint, when ``model`` is a module.
        on_unsupported: what becomes of a site that no kernel accepts.
        emitter: ``chain`` (CPU), ``inductor`` or ``eager``; the backend's choice when None.
        dtype: dtype of the activations; the backend's own choice when None.
        numerics: as for ``optimize``.

    Returns:
        the plan; sites without a kernel are part of it and do not raise.

    Raises:
        OptionError: an argument means nothing, or the module is compiled for another device.
        SchemeError: the checkpoint is damaged, of no known scheme, or does not fit the module.
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
    target, backend = backend_of(device)
    if isinstance(model, nn.Module):
        opened = opened_checkpoint(checkpoint, scheme)
        with described(model):
            catalogue = catalogue_of(opened, model)
            sites: list[Site] = module_sites(model, catalogue)
        floats = [w for w in catalogue.values() if not is_quantized(w.spec)]
    else:
        opened = schemes.open_checkpoint(model, scheme)
        sites, floats = opened.sites(), opened.floats()
    wanted = plan_dtype(backend, target, dtype)
    return make_plan(
        opened, sites, floats, target, backend, on_unsupported, wanted, emitter, numerics
    )


def optimize(
    model: Model,
    scheme: str = "auto",
    device: str = "cpu",
    checkpoint: str | Path | Checkpoint | None = None,
    dtype: torch.dtype | None = None,
    emulate: Emulation = False,
    verify: bool = False,
    *,
    on_unsupported: Policy = "error",
    emitter: str | None = None,
    keep: Iterable[str] = (),
    numerics: Numerics = "exact",
    fullgraph: bool = True,
    progress: Reporting = no_progress,
    **quantizer: Unpack[Options],
) -> Model:
    """Compile a module so that it runs on quantized weights: a checkpoint's, or its own.

    The module itself is changed and returned: parameters that the checkpoint quantizes become
    stand-ins without storage, parameters that it stores as floats are loaded, and ``forward`` (and
    with it Hugging Face ``generate``) is compiled on its first call. No float copy of a quantized
    weight is made.

    Without a checkpoint, ``scheme="rtn"`` (rounding to nearest) or ``scheme="gptq"`` (with
    ``calibration`` data) quantizes the module's own linears and gives up their float weights. A
    module that another library has loaded from a GPTQ or AWQ checkpoint (``qweight`` and
    ``scales`` in its submodules) is taken as it is.

    Args:
        model: any module; with a checkpoint its parameters may be on the meta device.
        scheme: the checkpoint's scheme, or ``auto``; or a quantizer, ``rtn`` or ``gptq``.
        device: where it runs: ``cpu``, ``cuda``, ``npu``, optionally with an architecture.
        checkpoint: the file or folder with the weights, or what ``qcompile.open`` returned.
        dtype: dtype of activations and of float parameters; None keeps the module's.
        emulate: run on the CPU what was lowered for another device, where the backend can: ``True``
            with the device's rounding, ``float32`` with float32 activations and sums on weights
            packed for ``dtype`` (float16 when that is None).
        verify: compare every site's kernel with the reference on the stored bytes first.
        on_unsupported: what becomes of sites that no kernel accepts: ``error``; ``dequantize`` to
            floats; ``requantize`` to 8 bits for a kernel that takes those, the error measured.
        emitter: ``chain`` (CPU), ``inductor`` or ``eager``; the backend's choice when None.
        keep: regular expressions of parameter names that stay as the module has them.
        numerics: ``exact`` uses activations as they are; ``fast`` lets kernels round them to 8 bits
            by groups, which takes less time where a prompt has many tokens.
        fullgraph: refuse graph breaks.
        progress: called while quantizing and while packing with a weight's name, bytes done and
            bytes in all; or ``bar``.
        quantizer: for a module's own weights: ``bits``, ``group_size``, ``sym``, ``lm_head``,
            ``skip``, ``calibration``, ``desc_act``, ``static_groups``, ``damp``; see
            ``qcompile.quantizers.Options``.

    Returns:
        the module; ``model.qcompile.plan`` is its plan.

    Raises:
        OptionError, SchemeError, PlanError, CaptureError, VerifyError: see the message. The module
            is then as it was, except when quantizing its own weights was interrupted: they are
            given up one by one, so it has to be built again.
    """
    check_fresh(model)
    report = reporter(progress)
    with one_node_a_layer(model):
        session = _prepared(
            model,
            scheme,
            checkpoint,
            keep,
            quantizer,
            functools.partial(
                session_for,
                model,
                scheme=scheme,
                device=device,
                dtype=dtype,
                emulate=emulate,
                on_unsupported=on_unsupported,
                emitter=emitter,
                numerics=numerics,
                progress=report,
            ),
            report,
        )
        if verify:
            from qcompile.verify import verify_session

            verify_session(session)
        floats = session.dtype if session.operands else dtype
        away = session.device if session.device.type != "cpu" else None
        install_weights(model, session.catalogue, floats, away)
    session.names = parameter_names(model, session.catalogue)
    install_forward(model, session, fullgraph)
    return model


# Modules, vocabulary and model stay: to look for cycles among them took a sixth of the time.
@uncollected()
def load(
    path: str | Path,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    emulate: Emulation = False,
    verify: bool = False,
    *,
    scheme: str = "auto",
    on_unsupported: Policy = "error",
    emitter: str | None = None,
    numerics: Numerics = "exact",
    progress: Reporting = no_progress,
) -> tuple[nn.Module, Any]:
    """A checkpoint's own Hugging Face model, compiled, and its tokenizer.

    Args:
        path: a GGUF file or a checkpoint folder.
        device: where it runs.
        dtype: dtype of the activations; the backend's own choice when None: float32 on a CPU.
        emulate, verify, scheme, on_unsupported, emitter, numerics, progress: as for
            ``optimize``.

    Returns:
        the model (``forward`` and ``generate``), in eval mode, and the tokenizer; None where the
        folder holds none.

    Raises:
        OptionError: an argument means nothing, transformers or the device is missing.
        SchemeError: the checkpoint is damaged, or does not describe a model that can be built.
        PlanError: a site has no kernel; told before the model is built.
        VerifyError: a site computes something else than the reference.
    """
    target, backend = backend_of(device)
    if emulate != "float32":
        dtype = plan_dtype(backend, target, dtype)
    check_dtype(dtype)
    checkpoint = schemes.open_checkpoint(path, scheme)
    built = torch.float32 if emulate == "float32" or dtype is None else dtype
    packed_for = narrow_dtype(dtype) if emulate == "float32" else built
    # The headers tell what has no kernel; a model and a tokenizer take seconds to build.
    require_kernels(
        make_plan(
            *(checkpoint, checkpoint.sites(), (), target, backend),
            *(on_unsupported, packed_for, emitter, numerics),
        )
    )
    model, tokenizer = checkpoint.build(built)
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
        numerics=numerics,
        progress=progress,
    )
    return compiled, tokenizer


# **** parts of the above ****


def _prepared(
    model: nn.Module,
    scheme: str,
    checkpoint: str | Path | Checkpoint | None,
    keep: Iterable[str],
    quantizer: Options,
    make: Callable[..., Session],
    report: Progress,
) -> Session:
    """The session of a model with a checkpoint, of one loaded by others, or of a float one."""
    if checkpoint is not None and scheme == "rtn":
        raise OptionError(
            'scheme="rtn"',
            "a checkpoint was given",
            "the model's own float weights, which rtn rounds",
            "leave the checkpoint out, or name the checkpoint's scheme",
        )
    if checkpoint is not None and not quantizer:
        opened = opened_checkpoint(checkpoint, scheme)
        with quantized_conv1d(model, opened.tensors):
            return make(checkpoint=opened, keep=keep)
    from qcompile import quantizers  # not before a model is quantized

    if checkpoint is None and packed_modules(model):
        quantizers.refuse_options(quantizer, "a model that is quantized already")
        from qcompile.schemes.loaded import loaded

        with loaded(model, scheme) as held:
            return make(checkpoint=held, in_place=True)
    reads = scheme == "auto" or (scheme in schemes.names() and scheme not in quantizers.QUANTIZERS)
    if checkpoint is not None or (not quantizer and reads):
        quantizers.refuse_options(quantizer, f"scheme={scheme!r} and a checkpoint")
        return make(checkpoint=checkpoint, keep=keep)
    settings = quantizers.settings_for(scheme, quantizer)
    kept = kept_names(model, shapes_of(model), keep)
    with quantizers.planned(model, settings, kept) as own:
        session = make(checkpoint=own, in_place=True)
    try:
        quantizers.quantize(own, report)
    except BaseException:
        mark_broken(model)
        raise
    session.plan = dataclasses.replace(session.plan, notes=own.notes())
    return session


def _same_target(target: Target, device: str) -> bool:
    asked = Target.parse(device)
    return asked.kind == target.kind and asked.arch in (None, target.arch)
