"""Linears that store their weight the other way round.

Comes in: a model with ``Conv1D`` modules of transformers (GPT-2 and its kin), which hold
``[in, out]``. Goes out: the same model with ``nn.Linear`` in their places.
Always holds: no value is copied, names and results stay the same, and the exchange can be undone.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from qcompile.errors import OptionError
from qcompile.spec import is_quantized
from qcompile.weight import WeightRef


@dataclass(frozen=True)
class Exchange:
    """A module that was exchanged: its parent, its name there, and what it was."""

    parent: nn.Module
    name: str
    before: nn.Module

    def undo(self) -> None:
        """Put the module back."""
        setattr(self.parent, self.name, self.before)


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is transformers' ``Conv1D``. Imports nothing."""
    home = sys.modules.get("transformers.pytorch_utils")
    return home is not None and type(module) is home.Conv1D


@contextlib.contextmanager
def quantized_conv1d(model: nn.Module, tensors: Mapping[str, WeightRef]) -> Iterator[None]:
    """Exchange the modules that a checkpoint quantizes; an error inside puts them back.

    A checkpoint stores the weights of quantized ``Conv1D`` as those of linears.
    """
    paths = [
        path
        for path, module in model.named_modules(remove_duplicate=False)
        if is_conv1d(module)
        and (weight := tensors.get(f"{path}.weight")) is not None
        and is_quantized(weight.spec)
    ]
    exchanged = exchange_conv1d(model, paths)
    try:
        yield
    except BaseException:
        for exchange in exchanged:
            exchange.undo()
        raise


def exchange_conv1d(model: nn.Module, paths: Collection[str] | None = None) -> list[Exchange]:
    """Put an ``nn.Linear`` in the place of every ``Conv1D``.

    Args:
        model: changed in place.
        paths: the modules to exchange, or None for all.

    Returns:
        what was exchanged, for ``Exchange.undo``.
    """
    done: list[Exchange] = []
    made: dict[int, nn.Linear] = {}
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if not path or not is_conv1d(module) or (paths is not None and path not in paths):
            continue
        parent, _, name = path.rpartition(".")
        exchange = Exchange(model.get_submodule(parent), name, module)
        if id(module) not in made:
            made[id(module)] = _linear_of(module)
        setattr(exchange.parent, name, made[id(module)])
        done.append(exchange)
    return done


def _linear_of(module: nn.Module) -> nn.Linear:
    weight, bias = module.get_parameter("weight"), module.get_parameter("bias")
    columns, rows = weight.shape
    linear = nn.Linear(columns, rows, device="meta")
    linear.weight = nn.Parameter(weight.detach().t(), requires_grad=weight.requires_grad)
    linear.bias = bias
    return linear.train(module.training)


def refuse_conv1d(model: nn.Module, catalogue: Mapping[str, WeightRef]) -> None:
    """Raise OptionError when a quantized weight is held the other way round.

    A square one would bind, and be used transposed.
    """
    for path, module in model.named_modules():
        weight = catalogue.get(f"{path}.weight")
        if is_conv1d(module) and weight is not None and is_quantized(weight.spec):
            raise OptionError(
                f"{type(model).__name__}: {path}",
                "a Conv1D, which holds its weight transposed",
                "a linear",
                "use qcompile.optimize(model, ...), which puts a linear in its place",
            )
