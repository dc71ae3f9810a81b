"""One run of the float model, watched.

Comes in: a model, its linears and one batch. Goes out: the order in which the linears run, which of
them share their input, and the stack of layers that can be calibrated one at a time.
Always holds: a stack is only found where every layer is called once, in order, with exactly the
tensor that the layer before returned; anything else is calibrated as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from qcompile.quantizers.expert_matrices import FloatExperts
from qcompile.quantizers.inputs import call, first_input
from qcompile.quantizers.linears import Part
from qcompile.quantizers.settings import Batch


@dataclass(frozen=True)
class Trace:
    """What one run showed.

    Attributes:
        order: names of the linears in the order of their first calls.
        leaders: linears that got the very tensor that another one got just before: its name.
        layers: the layers of the stack, in order; empty when there is none.
        output: what the last layer returned.
    """

    order: tuple[str, ...]
    leaders: Mapping[str, str]
    layers: tuple[nn.Module, ...]
    output: Any


@dataclass
class _Watch:
    """Records calls; ``last`` keeps the latest input alive, so that its identity means much."""

    calls: list[str] = field(default_factory=list)
    leaders: dict[str, str] = field(default_factory=dict)
    last: tuple[str, Any] = ("", None)
    layers: list[int] = field(default_factory=list)
    output: Any = None
    chained: bool = True

    def linear(self, name: str, x: Any) -> None:
        self.calls.append(name)
        if x is self.last[1] and name != self.last[0]:
            self.leaders[name] = self.last[0]
            return
        self.last = (name, x)

    def enter(self, index: int, x: Any, arguments: Sequence[Any]) -> None:
        if index and (x is not first_tensor(self.output) or not isinstance(x, torch.Tensor)):
            self.chained = False
        # A store of keys and values would be filled once by every pass over the layer.
        if any(hasattr(value, "update") for value in arguments):
            self.chained = False
        # A second result of one layer that goes into the next would not be its own batch's.
        others = self.output[1:] if isinstance(self.output, (tuple, list)) else ()
        if any(value is other for value in arguments for other in others if other is not None):
            self.chained = False
        self.layers.append(index)

    def leave(self, output: Any) -> None:
        self.output = output


def watch(model: nn.Module, linears: Sequence[Part], batch: Batch) -> Trace:
    """Run a batch through the model. Raises what the model raises."""
    seen = _Watch()
    layers = _stack(model, linears)
    handles = []
    for linear in linears:
        for module in linear.modules:
            handles.append(
                module.register_forward_pre_hook(
                    lambda _, args, kwargs, part=linear: seen.linear(
                        # Experts share no sum of inputs with anything.
                        part.name,
                        object() if isinstance(part, FloatExperts) else first_input(args, kwargs),
                    ),
                    with_kwargs=True,
                )
            )
    for index, layer in enumerate(layers):
        handles.append(
            layer.register_forward_pre_hook(
                lambda _, args, kwargs, index=index: seen.enter(
                    index, args[0] if args else None, (*args[1:], *kwargs.values())
                ),
                with_kwargs=True,
            )
        )
        handles.append(layer.register_forward_hook(lambda _, args, output: seen.leave(output)))
    try:
        call(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return _result(seen, layers)


def first_tensor(output: Any) -> Any:
    """The hidden states in what a layer returned."""
    return output[0] if isinstance(output, (tuple, list)) and output else output


def with_first_tensor(output: Any, hidden: torch.Tensor) -> Any:
    """What a layer returned, with other hidden states."""
    return type(output)((hidden, *output[1:])) if isinstance(output, (tuple, list)) else hidden


def _result(seen: _Watch, layers: Sequence[nn.Module]) -> Trace:
    once = {name for name in seen.calls if seen.calls.count(name) == 1}
    leaders = {name: to for name, to in seen.leaders.items() if name in once and to in once}
    streams = seen.chained and seen.layers == list(range(len(layers)))
    order = tuple(dict.fromkeys(seen.calls))
    return Trace(order, leaders, tuple(layers) if streams else (), seen.output)


def _stack(model: nn.Module, linears: Sequence[Part]) -> list[nn.Module]:
    """The list of modules with the most weights to quantize, the outermost of equals."""
    best, layers = 0, list[nn.Module]()
    sizes: dict[int, int] = {}
    for linear in linears:
        for held in linear.modules:
            sizes[id(held)] = sizes.get(id(held), 0) + linear.size
    for module in model.modules():
        if not isinstance(module, nn.ModuleList) or len(module) < 2:
            continue
        count = sum(sizes.get(id(inner), 0) for inner in module.modules())
        if count > best:
            best, layers = count, list(module)
    return layers
