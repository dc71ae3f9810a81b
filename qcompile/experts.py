"""Mixtures of experts as modules.

Comes in: a model. Goes out: its experts modules, each with what its node in the graph will say; the
model set up so that a trace shows one node a layer.
Always holds: routing stays the model's own code; a module whose function is not recognised is
refused by name, never approximated.

Models of transformers keep the experts of a layer in one module with three-dimensional parameters
and let a registered function compute them; ours calls ``qcompile::moe``. Other classes are told by
``register_experts``.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from qcompile.activation import Activation, recognise
from qcompile.errors import CaptureError
from qcompile.ops_experts import moe
from qcompile.register import adapted
from qcompile.stacked_experts import StackedExperts

_NAME = "qcompile"
_ACTIVATION = "qcompile_activation"


@dataclass(frozen=True)
class ExpertsModule:
    """The experts of one layer.

    Attributes:
        path: the module.
        up: name of the parameter ``[E, 2 I, H]`` (or ``[E, I, H]`` without a gate).
        down: name of the parameter ``[E, H, I]``.
        up_bias: name of its bias, or None.
        down_bias: name of its bias, or None.
        transposed: whether both parameters have their last two dimensions exchanged.
        activation: the function between the products.
    """

    path: str
    up: str
    down: str
    up_bias: str | None
    down_bias: str | None
    transposed: bool
    activation: Activation


def experts_modules(model: nn.Module) -> list[ExpertsModule]:
    """The experts modules of a model that transformers built, or of registered blocks.

    Raises:
        CaptureError: one computes something that the canonical op cannot say.
    """
    found = []
    for path, module in model.named_modules():
        if isinstance(module, StackedExperts):
            found.append(_stacked(path, module))
        elif _is_experts(module):
            found.append(_described(path, module))
    return found


def _is_experts(module: nn.Module) -> bool:
    """Whether a module is of a class that transformers lets registered functions compute."""
    flags = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "_apply_gate")
    return all(hasattr(module, flag) for flag in flags) and hasattr(module, "config")


def _stacked(path: str, module: StackedExperts) -> ExpertsModule:
    up = f"{path}.{'gate_up_proj' if module.has_gate else 'up_proj'}"
    down = f"{path}.down_proj"
    names = dict(module.named_parameters(prefix=path))
    up_bias, down_bias = (n if (n := f"{name}_bias") in names else None for name in (up, down))
    activation = Activation.parse(module.activation)
    return ExpertsModule(path, up, down, up_bias, down_bias, False, activation)


def _described(path: str, module: Any) -> ExpertsModule:
    if getattr(module, "has_post_expert_norm", False) or getattr(
        module, "_is_expert_parallel", False
    ):
        raise CaptureError(
            path,
            f"{type(module).__name__} normalizes each expert's output or holds a part of them",
            "experts that are two products and a function",
            "leave the layer's experts in floats with keep, or use another device count",
        )
    up = "gate_up_proj" if module.has_gate else "up_proj"
    missing = [
        n for n in (up, "down_proj") if not isinstance(getattr(module, n, None), nn.Parameter)
    ]
    if missing:
        raise CaptureError(
            path,
            f"{type(module).__name__} has no parameter {missing[0]}",
            f"three-dimensional parameters {up} and down_proj",
            "describe the class with qcompile.register_experts",
        )
    activation = _activation(path, module)
    bias = module.has_bias
    return ExpertsModule(
        path,
        f"{path}.{up}",
        f"{path}.down_proj",
        f"{path}.{up}_bias" if bias else None,
        f"{path}.down_proj_bias" if bias else None,
        bool(module.is_transposed),
        activation,
    )


def _activation(path: str, module: Any) -> Activation:
    function: Callable[[torch.Tensor], torch.Tensor] = (
        module._apply_gate if module.has_gate else module.act_fn
    )
    alphas = tuple(float(v) for v in (getattr(module, "alpha", None),) if v is not None)
    named = (getattr(module, name, None) for name in ("limit", "swiglu_limit"))
    limits = tuple(float(v) for v in named if v is not None)
    with torch.no_grad():
        found = recognise(function, module.has_gate, alphas, limits)
    if found is None:
        raise CaptureError(
            path,
            f"the function between the products of {type(module).__name__} is not known",
            "one of silu, gelu, relu and their gated forms",
            "leave the layer's experts in floats with keep",
        )
    return found


def experts_forward(module: Any, *given: Any, **named: Any) -> torch.Tensor:
    """What an experts module computes, given tokens ``[T, H]``, experts and weights ``[T, k]``."""
    x, ids, weights = (*given, *named.values())
    up = module.gate_up_proj if module.has_gate else module.up_proj
    up_bias = down_bias = None
    if module.has_bias:
        up_bias = module.gate_up_proj_bias if module.has_gate else module.up_proj_bias
        down_bias = module.down_proj_bias
    return moe(  # type: ignore[no-any-return]
        x,
        ids,
        weights,
        up,
        module.down_proj,
        up_bias,
        down_bias,
        getattr(module, _ACTIVATION),
        bool(module.is_transposed),
    )


@contextlib.contextmanager
def one_node_a_layer(model: nn.Module) -> Iterator[list[ExpertsModule]]:
    """Let the experts of every layer be one node of a trace; an error inside undoes it.

    Args:
        model: its experts modules keep their parameters and get our function.
    """
    with adapted(model) as undo:
        try:
            found = experts_modules(model)
            for described in found:
                module: Any = model.get_submodule(described.path)
                if isinstance(module, StackedExperts):
                    continue
                interface = sys.modules["transformers.integrations.moe"].ALL_EXPERTS_FUNCTIONS
                interface.register(_NAME, experts_forward)
                setattr(module, _ACTIVATION, str(described.activation))
                undo.append(_switch(module.config))
            yield found
        except BaseException:
            for step in reversed(undo):
                step()
            raise


def _switch(config: Any) -> Callable[[], None]:
    """Make a configuration name our function; what undoes it."""
    before = config._experts_implementation
    config._experts_implementation_internal = _NAME

    def back() -> None:
        config._experts_implementation_internal = before

    return back
