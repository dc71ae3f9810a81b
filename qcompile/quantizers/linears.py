"""What is quantized and what stays in float.

Comes in: a model and settings. Goes out: its linears, and the names of the matrices left in float.
Always holds: a weight counts once, under its first name, however many modules share it; a weight
that something else than a linear holds too (a tied embedding) stays in float.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import nn

from qcompile.conv1d import is_conv1d
from qcompile.errors import OptionError, nearest
from qcompile.experts import experts_modules
from qcompile.quantizers.expert_matrices import FloatExperts, routers
from qcompile.quantizers.grid import check_finite
from qcompile.quantizers.settings import Settings


@dataclass(frozen=True)
class FloatLinear:
    """A weight to quantize.

    Attributes:
        name: the parameter's first name.
        modules: the linears that hold it.
        paths: their module paths.
    """

    name: str
    modules: tuple[nn.Linear, ...]
    paths: tuple[str, ...]

    @property
    def weight(self) -> torch.Tensor:
        """The float weight ``[N, K]``."""
        return self.modules[0].weight

    @property
    def size(self) -> int:
        """How many values the weight has."""
        return self.weight.numel()


Part = FloatLinear | FloatExperts


def is_linear(module: nn.Module) -> bool:
    """Whether a module computes ``x @ w.T + b`` by being called, and in no other way."""
    weight = module._parameters.get("weight")
    # Computed anew at every call, for instance by weight_norm; or without shape or columns yet.
    if not isinstance(weight, nn.Parameter) or nn.parameter.is_lazy(weight) or not weight.numel():
        return False
    if is_conv1d(module):
        return True
    # The projections inside nn.MultiheadAttention are linears that nobody calls.
    inner = isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward and not inner


def chosen_paths(
    model: nn.Module,
    settings: Settings,
    kept: Collection[str] = (),
    experts: Collection[FloatExperts] = (),
) -> list[str]:
    """Module paths of the linears to quantize.

    Args:
        model: not changed. Linears that weigh experts stay in float.
        settings: what to leave out.
        kept: parameters that stay in float whatever module holds them.
        experts: what is quantized besides linears.

    Raises:
        OptionError: a pattern that names nothing, a tied head that was asked for, or nothing left.
    """
    aside = routers(model)
    linears = {path: m for path, m in model.named_modules(remove_duplicate=False) if is_linear(m)}
    _check_patterns(settings, [*linears, *(m.path for m in experts_modules(model))])
    head = _head(model)
    holders = _holders(model)
    chosen: list[str] = []
    for path, module in linears.items():
        weight = module.get_parameter("weight")
        shared = [name for name, holder in holders[id(weight)] if not is_linear(holder)]
        if module is head and settings.lm_head and shared:
            raise OptionError(
                "lm_head=True",
                f"the model ties {path} to {shared[0]}, which stays in float",
                "a head with a weight of its own",
                "leave lm_head out, or build the model with tie_word_embeddings=False",
            )
        skipped = any(pattern.fullmatch(path) for pattern in settings.skip)
        names = {name for name, _ in holders[id(weight)]}
        left = path in aside or (module is head and not settings.lm_head)
        if skipped or shared or names & set(kept) or left:
            continue
        chosen.append(path)
    if settings.lm_head and head is None:
        raise OptionError("lm_head=True", "the model has no output head", "one", "leave it out")
    if not chosen and not experts:
        raise OptionError(
            type(model).__name__, "no linear to quantize", "at least one", "skip less, or keep less"
        )
    _check_values(model, [*map(_weight_name, chosen), *(e.name for e in experts)], settings.bits)
    return chosen


def _weight_name(path: str) -> str:
    """The parameter of the linear at a path; the model itself may be one."""
    return f"{path}.weight" if path else "weight"


def float_linears(model: nn.Module, paths: Collection[str]) -> tuple[FloatLinear, ...]:
    """The weights behind module paths, each once. Every path is an ``nn.Linear`` by now."""
    shared: dict[int, list[str]] = {}
    for path in paths:
        shared.setdefault(id(_linear(model, path).weight), []).append(path)
    return tuple(
        FloatLinear(_weight_name(paths[0]), tuple(_linear(model, p) for p in paths), tuple(paths))
        for paths in shared.values()
    )


def left_in_float(model: nn.Module, quantized: Collection[str]) -> list[str]:
    """Matrices that stay in float, layers written as ``*``, with how many there are of each."""
    alike: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2 and name not in quantized:
            pattern = re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "*", name)
            alike.setdefault(pattern, []).append(name)
    return [
        names[0] if len(names) == 1 else f"{pattern} ({len(names)})"
        for pattern, names in alike.items()
    ]


def _linear(model: nn.Module, path: str) -> nn.Linear:
    module = model.get_submodule(path)
    assert isinstance(module, nn.Linear)
    return module


def _holders(model: nn.Module) -> dict[int, list[tuple[str, nn.Module]]]:
    """Every name of every parameter, with the module that holds it, by identity."""
    found: dict[int, list[tuple[str, nn.Module]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for key, parameter in module.named_parameters(recurse=False):
            name = f"{path}.{key}" if path else key
            found.setdefault(id(parameter), []).append((name, module))
    return found


def _head(model: nn.Module) -> nn.Module | None:
    """The output head, as transformers knows it, or what goes by its usual name."""
    getter = getattr(model, "get_output_embeddings", None)
    head = getter() if callable(getter) else getattr(model, "lm_head", None)
    return head if isinstance(head, nn.Module) else None


def _check_patterns(settings: Settings, paths: Collection[str]) -> None:
    for pattern in settings.skip:
        if not any(pattern.fullmatch(path) for path in paths):
            raise OptionError(
                f"skip=[{pattern.pattern!r}]",
                "matches no linear in full",
                f"a pattern for names such as {', '.join(list(paths)[:3])}",
                f"correct it{nearest(pattern.pattern, paths)}",
            )


def _check_values(model: nn.Module, names: Collection[str], bits: int) -> None:
    for name in names:
        weight = model.get_parameter(name)
        if weight.is_meta:
            raise OptionError(
                name,
                "is on the meta device",
                "a parameter with values",
                "load the float model with its weights, or pass a quantized checkpoint=",
            )
        if weight.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise OptionError(
                name,
                f"has dtype {weight.dtype}",
                "float32, float16 or bfloat16",
                "convert the model first, or leave it out with skip=[...]",
            )
        check_finite(name, weight.detach(), bits)
