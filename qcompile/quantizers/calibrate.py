"""GPTQ over a whole model, one layer in flight.

Comes in: a float model, its linears, calibration batches. Goes out: every linear quantized, through
a callback, in the order of the model.
Always holds: a linear is calibrated with what reaches it through the layers before it as they are
*after* quantization; only one layer has Hessians at a time; every linear comes to the callback
once, also when no batch reaches it.

The layers run one after another, each on the stored outputs of the one before. Within a layer the
linears that share an input go together, in the order of their calls: queries, keys and values, then
the output projection, and so on; experts of one kind go together too. Linears before and after the
layers come last, on the output of the last layer. A model without a stack of layers is run as a
whole, and all its linears are quantized at once.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from qcompile.quantizers.inputs import Inputs, Mask, call, collecting, patched
from qcompile.quantizers.linears import Part
from qcompile.quantizers.settings import Batch
from qcompile.quantizers.trace import Trace, first_tensor, watch, with_first_tensor


@dataclass(frozen=True)
class Work:
    """What to do with the linears.

    Attributes:
        quantize: called once for each linear with its inputs, perhaps none; leaves the rounded
            values in the weight.
        done: called when a linear's weight will not be needed again.
    """

    quantize: Callable[[Part, Inputs], None]
    done: Callable[[Part], None]


def calibrate(
    model: nn.Module, linears: Sequence[Part], batches: Sequence[Batch], work: Work
) -> None:
    """Quantize all linears with calibration data.

    Args:
        model: in evaluation mode, without a cache of keys and values.
        linears: what to quantize.
        batches: what the model is called with.
        work: how to quantize one.
    """
    trace = watch(model, linears, batches[0])
    rest = _ordered(linears, trace)
    mask = Mask()
    if not trace.layers:
        _together(rest, trace, mask, _whole(model, batches, mask), work)
        return
    stream = _Stream(model, trace, batches, mask)
    for index, layer in enumerate(trace.layers):
        inside = {id(module) for module in layer.modules()}
        mine = [linear for linear in rest if id(linear.modules[0]) in inside]
        rest = [linear for linear in rest if linear not in mine]
        for step in _steps(mine, trace):
            _together(step, trace, mask, stream.run(index), Work(work.quantize, _nothing))
        if rest:
            stream.advance(index)
        for linear in mine:
            work.done(linear)
    _together(rest, trace, mask, stream.around(), work)


def _together(
    linears: Sequence[Part], trace: Trace, mask: Mask, runs: Iterator[Any], work: Work
) -> None:
    """Quantize linears from the inputs they get in the same runs."""
    if not linears:
        return
    with collecting(linears, trace.leaders, mask) as grams:
        for _ in runs:
            pass
    for linear in linears:
        work.quantize(linear, grams[linear.name])
        work.done(linear)


def _nothing(linear: Part) -> None:
    """The weight is needed until its layer has run."""


def _whole(model: nn.Module, batches: Sequence[Batch], mask: Mask) -> Iterator[None]:
    for batch in batches:
        mask.of(batch)
        call(model, batch)
        yield


def _ordered(linears: Sequence[Part], trace: Trace) -> list[Part]:
    """Linears as they run; those that one batch does not reach come last."""
    place = {name: index for index, name in enumerate(trace.order)}
    return sorted(linears, key=lambda linear: place.get(linear.name, len(place)))


def _steps(linears: Sequence[Part], trace: Trace) -> list[list[Part]]:
    """Linears that are calibrated in one run: those that share inputs, and experts of one kind."""
    steps: dict[str, list[Part]] = {}
    for linear in linears:
        leader = trace.leaders.get(linear.name, linear.name)
        steps.setdefault(re.sub(r"\.\d+(?=\.)", ".*", leader), []).append(linear)
    return list(steps.values())


class _Stop(Exception):
    """Ends a run of the model at its last layer."""


@dataclass
class _Stream:
    """The hidden states on their way through the layers.

    Attributes:
        model: the whole model.
        trace: its stack of layers.
        batches: what the model is called with.
        mask: told which batch runs.
        hidden: the input of the next layer, for each batch.
        calls: the further arguments of every layer, for each batch.
    """

    model: nn.Module
    trace: Trace
    batches: Sequence[Batch]
    mask: Mask
    hidden: list[torch.Tensor] = field(default_factory=list)
    calls: list[list[tuple[tuple[Any, ...], dict[str, Any]]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Run each batch up to the layers, and record what every layer is called with."""
        for batch in self.batches:
            self.calls.append([])
            with patched(self.trace.layers, self._record), contextlib.suppress(_Stop):
                call(self.model, batch)

    def _record(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls = self.calls[-1]
        if not calls:
            self.hidden.append(hidden)
        calls.append((args, kwargs))
        if len(calls) == len(self.trace.layers):
            raise _Stop
        return with_first_tensor(self.trace.output, hidden)

    def run(self, index: int) -> Iterator[Any]:
        """What a layer returns for every batch."""
        for batch, hidden, calls in zip(self.batches, self.hidden, self.calls, strict=True):
            self.mask.of(batch)
            args, kwargs = calls[index]
            yield self.trace.layers[index](hidden, *args, **kwargs)

    def advance(self, index: int) -> None:
        """Make the layer's outputs the input of the next one."""
        for place, output in enumerate(self.run(index)):
            self.hidden[place] = first_tensor(output)

    def around(self) -> Iterator[None]:
        """Run every batch through all but the layers, which hand over their known result."""
        for batch, hidden in zip(self.batches, self.hidden, strict=True):
            self.mask.of(batch)
            answer = with_first_tensor(self.trace.output, hidden)
            with patched(self.trace.layers, lambda *args, answer=answer, **kwargs: answer):
                call(self.model, batch)
            yield
