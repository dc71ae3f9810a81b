"""Quantizers of float models.

Comes in: a model whose parameters have values, and options. Goes out: the model's weights
quantized, as a checkpoint in memory that the pipeline takes like any other.
Always holds: options, the model and the plan are checked before the first weight is touched; float
weights are given up one by one, so the peak is the float model, a layer in flight and what is
quantized so far.

Once quantizing has begun, a failure (memory, an interrupt, data that the model refuses) leaves the
module with weights that raise when they are read; it has to be built again.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from qcompile.conv1d import exchange_conv1d
from qcompile.layout import layout_of
from qcompile.quantizers.checkpoint import InPlace
from qcompile.quantizers.expert_matrices import FloatExperts, chosen_experts
from qcompile.quantizers.linears import Part, chosen_paths, float_linears
from qcompile.quantizers.settings import (
    QUANTIZERS,
    Options,
    Settings,
    refuse_options,
    settings_for,
)
from qcompile.schemes.gptq.layout import NAME
from qcompile.session import Progress

if TYPE_CHECKING:
    from qcompile.quantizers.inputs import Gram, Inputs

__all__ = [
    "QUANTIZERS",
    "InPlace",
    "Options",
    "Settings",
    "planned",
    "quantize",
    "refuse_options",
    "settings_for",
]


@contextlib.contextmanager
def planned(model: nn.Module, settings: Settings, kept: Collection[str] = ()) -> Iterator[InPlace]:
    """A model as a checkpoint that is not filled yet; an error inside leaves the model as it was.

    Args:
        model: ``Conv1D`` modules that are quantized become ``nn.Linear``.
        settings: how to quantize it.
        kept: parameters that stay in float.
    """
    experts = chosen_experts(model, settings, kept)
    paths = chosen_paths(model, settings, kept, experts)
    exchanged = exchange_conv1d(model, paths)
    try:
        yield InPlace(model, settings, float_linears(model, paths), experts)
    except BaseException:
        for exchange in exchanged:
            exchange.undo()
        raise


def quantize(opened: InPlace, progress: Progress) -> None:
    """Quantize every linear and all experts of a planned model and release their float weights.

    Args:
        opened: what ``planned`` gave.
        progress: called with a weight's name, bytes done and bytes in all.

    Raises:
        OptionError: a weight or its calibration inputs are not finite.
    """
    job = _Job(opened, progress)
    parts: tuple[Part, ...] = (*opened.linears, *opened.experts)
    if not opened.settings.batches:
        if opened.settings.method == "gptq":
            warnings.warn(
                "scheme='gptq' has no calibration data: weights are rounded to nearest",
                stacklevel=4,
            )
        for part in parts:
            job.rounded(part)
            opened.release(part)
    else:
        from qcompile.quantizers.calibrate import Work, calibrate
        from qcompile.quantizers.inputs import quiet

        with quiet(opened.model):
            work = Work(job.calibrated, opened.release)
            calibrate(opened.model, parts, opened.settings.batches, work)
    job.finish()


def _matrices(part: Part) -> Iterator[tuple[str, torch.Tensor]]:
    """The matrices of a linear or of experts, one in flight, with their names."""
    if isinstance(part, FloatExperts):
        for expert in range(part.count):
            yield part.member(expert), part.matrix(expert)
    else:
        yield part.name, part.weight


class _Job:
    """Quantizing one model: what to do with one linear, and how far it is."""

    def __init__(self, opened: InPlace, progress: Progress) -> None:
        self.opened = opened
        self.settings = opened.settings
        self.report = progress
        self.done = 0
        self.total = sum(weight.nbytes for weight in opened.tensors.values())

    def rounded(self, part: Part) -> None:
        """Round a linear or experts to nearest."""
        for name, values in _matrices(part):
            self._round(name, values)

    def _round(self, name: str, values: torch.Tensor) -> None:
        # Not at the top: importing the package stays light.
        from qcompile.quantizers.rtn import quantize_rtn

        self._begin(name, values)
        spec = self.settings.spec(values.shape[1])
        self.opened.store(name, quantize_rtn(values, spec, name, self.settings.search))

    def calibrated(self, part: Part, inputs: Inputs) -> None:
        """Quantize a linear or experts by GPTQ and put the rounded values into their weights."""
        grams = inputs if isinstance(inputs, tuple) else (inputs,)
        for place, ((name, values), gram) in enumerate(zip(_matrices(part), grams, strict=True)):
            self._calibrate(name, values, gram)
            rounded = self.opened.stored(name)
            if isinstance(part, FloatExperts):
                part.put(place, rounded)
            else:
                part.weight.data.copy_(rounded)

    def _calibrate(self, name: str, values: torch.Tensor, inputs: Gram) -> None:
        from qcompile.quantizers.gptq import quantize_gptq

        hessian = inputs.hessian
        if hessian is None:
            self.opened.unreached.append(name)
            self._round(name, values)
            return
        self._begin(name, values)
        if inputs.rows < len(hessian):
            self.opened.few[name] = inputs.rows
        result = quantize_gptq(
            values,
            hessian,
            self.settings.spec(values.shape[1]),
            act_order=self.settings.desc_act,
            static_groups=self.settings.static_groups,
            damp=self.settings.damp,
            name=name,
        )
        self.opened.losses[name] = result.loss
        self.opened.store(name, result.weight)

    def finish(self) -> None:
        """Say what was only rounded although there was calibration data."""
        self.report("", self.total, self.total)
        missed = self.opened.unreached
        if missed:
            warnings.warn(
                f"no calibration data reached {len(missed)} linears, rounded to nearest: "
                f"{', '.join(missed)}",
                stacklevel=5,
            )

    def _begin(self, name: str, values: torch.Tensor) -> None:
        self.report(name, self.done, self.total)
        shape = (values.shape[0], values.shape[1])
        self.done += layout_of(NAME).nbytes(self.settings.spec(shape[1]), shape)
