"""What a compiled module cannot do any more, refused by name.

Comes in: a module whose quantized parameters are stand-ins. Goes out: the same module.
Always holds: a call that would need the floats behind a stand-in, or bind the compiled code to
other tensors, raises an error that says so; calls that change nothing still work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from qcompile.errors import OptionError


def seal(model: nn.Module) -> None:
    """Let copies, pickles and changes of dtype or device raise OptionError.

    The same holds for the parts that contain a stand-in. ``state_dict`` still tells names and
    shapes; pickling a stand-in of it raises. ``save_pretrained`` writes what ``save_checkpoint``
    does.
    """
    name = type(model).__name__

    def refuse_pickle(protocol: object) -> NoReturn:
        raise _error(name, "saved", "keep the checkpoint: it holds the quantized weights")

    def seal_state(_: object, state: dict[str, Any], prefix: str, metadata: object) -> None:
        for value in state.values():
            if isinstance(value, FakeTensor):
                object.__setattr__(value, "__reduce_ex__", refuse_pickle)

    _seal_values(model, name)
    for part in model.modules():
        if any(isinstance(p.data, FakeTensor) for p in part.parameters()):
            _seal_values(part, name)
    model.register_state_dict_post_hook(seal_state)
    if hasattr(model, "save_pretrained"):
        from qcompile.hf_saving import seal_saving

        seal_saving(model)


def _seal_values(part: nn.Module, name: str) -> None:
    """Keep one module's values where they are and as they are."""

    def refuse_copy(protocol: object) -> NoReturn:
        raise _error(
            name, "copied or pickled", "load or optimize a second model; both read one checkpoint"
        )

    def apply(change: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        if not all(_kept(change, tensor) for tensor in _kinds(part)):
            raise _error(
                name, "converted or moved", "give dtype= and device= when it is loaded or optimized"
            )
        return part

    # On the object, where the callers look: its class belongs to others.
    sealed: dict[str, Any] = {"__reduce_ex__": refuse_copy, "_apply": apply}
    for attribute, call in sealed.items():
        object.__setattr__(part, attribute, call)


def _error(name: str, done: str, fix: str) -> OptionError:
    return OptionError(
        name,
        f"a compiled module cannot be {done}: its quantized parameters are stand-ins, not values",
        "a module with values, or nothing to change",
        fix,
    )


def _kinds(model: nn.Module) -> list[torch.Tensor]:
    """An empty tensor for each kind of tensor that the model holds."""
    kinds = {(t.dtype, t.device) for t in [*model.parameters(), *model.buffers()]}
    return [torch.empty(0, dtype=dtype, device=device) for dtype, device in kinds]


def _kept(change: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> bool:
    changed = change(tensor)
    return changed.dtype == tensor.dtype and changed.device == tensor.device
