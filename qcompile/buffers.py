"""Buffers whose values a checkpoint holds, for instance a router's correction of its scores.

Comes in: a model and a checkpoint. Goes out: weights of buffers, and their values.
Always holds: only buffers that are part of the model's state are filled; one that the checkpoint
does not hold stays as the model has it, and keeps its dtype.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from qcompile.binding import bind
from qcompile.errors import SchemeError
from qcompile.layout import Shape
from qcompile.schemes import Checkpoint
from qcompile.spec import is_quantized
from qcompile.weight import WeightRef


@runtime_checkable
class HoldsBuffers(Protocol):
    """A checkpoint that may hold values of buffers."""

    def buffers(self, names: Collection[str]) -> Mapping[str, WeightRef]:
        """Weights for those of some buffers, by the model's names, that the checkpoint holds."""


def held_buffers(opened: Checkpoint, model: nn.Module) -> dict[str, WeightRef]:
    """Weights for the buffers of a model that a checkpoint holds, by the buffers' names.

    Raises:
        SchemeError: the checkpoint's shape is another one, or it quantizes a buffer.
    """
    shapes = _shapes(model)
    if not shapes or not isinstance(opened, HoldsBuffers):
        return {}
    found = opened.buffers(shapes)
    for weight in found.values():
        if is_quantized(weight.spec):
            raise SchemeError(
                weight.source,
                f"stored as {weight.spec}",
                "floats, because it fills a buffer",
                "convert the checkpoint again",
            )
    return bind({name: shapes[name] for name in found}, found, str(opened.path))


def buffer_values(model: nn.Module, catalogue: Mapping[str, WeightRef]) -> dict[str, torch.Tensor]:
    """The new values of the buffers that a catalogue names."""
    found: dict[str, torch.Tensor] = {}
    for name in _shapes(model):
        if name in catalogue:
            held = model.get_buffer(name)
            # A copy: it may be a view of the file. Whole numbers would lose digits as floats.
            found[name] = catalogue[name].load().parts["data"].to(held.dtype, copy=True)
    return found


def _shapes(model: nn.Module) -> dict[str, Shape]:
    """Shapes of the buffers that are part of the model's state."""
    return {
        f"{path}.{key}" if path else key: tuple(held.shape)
        for path, module in model.named_modules()
        for key, held in module._buffers.items()
        if held is not None and key not in module._non_persistent_buffers_set
    }
