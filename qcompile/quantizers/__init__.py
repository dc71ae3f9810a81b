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

from torch import nn

from qcompile.conv1d import exchange_conv1d
from qcompile.quantizers.calibrate import Work, calibrate
from qcompile.quantizers.checkpoint import InPlace
from qcompile.quantizers.gptq import quantize_gptq
from qcompile.quantizers.inputs import Gram, quiet
from qcompile.quantizers.linears import FloatLinear, chosen_paths, float_linears
from qcompile.quantizers.rtn import quantize_rtn
from qcompile.quantizers.settings import (
    QUANTIZERS,
    Options,
    Settings,
    refuse_options,
    settings_for,
)
from qcompile.session import Progress

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
    paths = chosen_paths(model, settings, kept)
    exchanged = exchange_conv1d(model, paths)
    try:
        yield InPlace(model, settings, float_linears(model, paths))
    except BaseException:
        for exchange in exchanged:
            exchange.undo()
        raise


def quantize(opened: InPlace, progress: Progress) -> None:
    """Quantize every linear of a planned model and release its float weight.

    Args:
        opened: what ``planned`` gave.
        progress: called with a weight's name, bytes done and bytes in all.

    Raises:
        OptionError: a weight or its calibration inputs are not finite.
    """
    job = _Job(opened, progress)
    if not opened.settings.batches:
        if opened.settings.method == "gptq":
            warnings.warn(
                "scheme='gptq' has no calibration data: weights are rounded to nearest",
                stacklevel=4,
            )
        for linear in opened.linears:
            job.round(linear)
            opened.release(linear)
    else:
        with quiet(opened.model):
            work = Work(job.calibrated, opened.release)
            calibrate(opened.model, opened.linears, opened.settings.batches, work)
    job.finish()


class _Job:
    """Quantizing one model: what to do with one linear, and how far it is."""

    def __init__(self, opened: InPlace, progress: Progress) -> None:
        self.opened = opened
        self.settings = opened.settings
        self.report = progress
        self.done = 0
        self.total = sum(weight.nbytes for weight in opened.tensors.values())

    def round(self, linear: FloatLinear) -> None:
        """Round a linear's weight to nearest."""
        self._begin(linear)
        spec = self.settings.spec(linear.weight.shape[1])
        self.opened.store(
            linear, quantize_rtn(linear.weight, spec, linear.name, self.settings.search)
        )

    def calibrated(self, linear: FloatLinear, inputs: Gram) -> None:
        """Quantize a linear by GPTQ and put the rounded values into its weight."""
        hessian = inputs.hessian
        if hessian is None:
            self.opened.unreached.append(linear.name)
            self.round(linear)
        else:
            self._begin(linear)
            if inputs.rows < len(hessian):
                self.opened.few[linear.name] = inputs.rows
            result = quantize_gptq(
                linear.weight,
                hessian,
                self.settings.spec(linear.weight.shape[1]),
                act_order=self.settings.desc_act,
                static_groups=self.settings.static_groups,
                damp=self.settings.damp,
                name=linear.name,
            )
            self.opened.losses[linear.name] = result.loss
            self.opened.store(linear, result.weight)
        linear.weight.data.copy_(self.opened.dequantize(linear.name))

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

    def _begin(self, linear: FloatLinear) -> None:
        self.report(linear.name, self.done, self.total)
        self.done += self.opened.tensors[linear.name].nbytes
