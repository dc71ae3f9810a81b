"""Mixtures of experts of one's own: blocks that loop over a list of experts.

Comes in: a class, and a forward that does not loop. Goes out: modules of that class whose experts
are one node of a trace.
Always holds: a block whose parameters have values is only changed when the new forward gives what
the old one gives; everything can be undone.

A block holds a list of experts, each ``down(act(gate(x)) * up(x))``. When compiled, the list is one
module with all their matrices under the list's own name, called with tokens ``[T, H]``, experts
``[T, k]`` and weights ``[T, k]``. A checkpoint's tensors keep the names of single experts.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from qcompile.activation import Activation, recognise_expert
from qcompile.errors import CaptureError, OptionError
from qcompile.ops_experts import moe
from qcompile.spec import Role

# How far the two forwards may be apart: experts are summed in another order, and in float32.
_CLOSE = {torch.float32: 1e-4, torch.float64: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
_TOKENS = 24


@dataclass(frozen=True)
class _Description:
    """What ``register_experts`` was told of a class."""

    forward: Callable[..., Any]
    experts: str
    gate: str | None
    up: str
    down: str


_KNOWN: dict[type[nn.Module], _Description] = {}


def register_experts(
    cls: type[nn.Module],
    forward: Callable[..., Any],
    *,
    experts: str = "experts",
    gate: str | None = "gate_proj",
    up: str = "up_proj",
    down: str = "down_proj",
) -> None:
    """Describe a class of blocks that loop over their experts.

    ``qcompile.optimize`` then runs the experts of each such block as one kernel. A block whose
    parameters have values is called with random hidden states ``[1, T, H]`` first, and refused
    where ``forward`` gives something else than the class's own.

    Args:
        cls: the class, not its subclasses.
        forward: what a block computes, called like the class's ``forward``. It routes as that does,
            and calls ``self.<experts>(x, ids, weights)`` where that loops.
        experts: attribute of the ``nn.ModuleList`` of experts.
        gate: attribute of an expert: the linear behind the activation; None where there is none.
        up: the linear that is multiplied with it.
        down: the last linear.

    Raises:
        OptionError: ``cls`` is no class of modules, or ``forward`` cannot be called.

    Example::

        def forward(self, hidden):
            x = hidden.flatten(0, -2)
            weights, ids = self.gate(x).softmax(-1).topk(self.top_k, -1)
            return self.experts(x, ids, weights).view_as(hidden)

        qcompile.register_experts(MyBlock, forward, gate="w1", up="w3", down="w2")
    """
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)) or not callable(forward):
        raise OptionError(
            "register_experts",
            f"{cls!r} and {forward!r}",
            "a subclass of nn.Module, and a function",
            "pass the class of the block and its new forward",
        )
    _KNOWN[cls] = _Description(forward, experts, gate, up, down)


def registered_roles() -> dict[str, Role]:
    """What part a linear plays in an expert, by the names given to ``register_experts``."""
    found: dict[str, Role] = {}
    for what in _KNOWN.values():
        found |= {what.up: "up", what.down: "down"}
        if what.gate is not None:
            found[what.gate] = "gate"
    return found


class StackedExperts(nn.Module):
    """All experts of a block: two parameters, output rows first, gate rows before up rows.

    Attributes:
        activation: text of the function between the products.
    """

    def __init__(
        self, experts: Sequence[nn.Module], what: _Description, activation: str, values: bool
    ) -> None:
        super().__init__()
        self.activation = activation
        self.has_gate = what.gate is not None
        inner = [name for name in (what.gate, what.up) if name is not None]
        up = "gate_up_proj" if self.has_gate else "up_proj"
        for name, linears in ((up, inner), ("down_proj", [what.down])):
            for part, suffix in (("weight", ""), ("bias", "_bias")):
                self.register_parameter(f"{name}{suffix}", _stacked(experts, linears, part, values))

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The weighted sums ``[T, H]`` of what the chosen experts make of each token."""
        up = self.gate_up_proj if self.has_gate else self.up_proj
        bias = self.gate_up_proj_bias if self.has_gate else self.up_proj_bias
        return moe(  # type: ignore[no-any-return]
            x, ids, weights, up, self.down_proj, bias, self.down_proj_bias, self.activation, False
        )


@contextlib.contextmanager
def described(model: nn.Module) -> Iterator[None]:
    """Let the model look as it would when compiled, without values, inside the block."""
    undo = adapt(model, values=False)
    try:
        yield
    finally:
        for step in reversed(undo):
            step()


def adapt(model: nn.Module, values: bool = True) -> list[Callable[[], None]]:
    """Let every registered block of a model run its experts as one node.

    Args:
        model: changed in place; experts with values share their memory with the new parameters.
        values: whether the new parameters have the experts' values, which are compared then.

    Returns:
        what undoes it, in order.

    Raises:
        CaptureError: a block is not what was registered, or computes something else.
    """
    undo: list[Callable[[], None]] = []
    try:
        for path, module in list(model.named_modules()):
            what = _KNOWN.get(type(module))
            if what is not None and _is_float(module, what):
                undo.append(_adapted(path, module, what, values))
    except BaseException:
        for step in reversed(undo):
            step()
        raise
    return undo


def _is_float(block: nn.Module, what: _Description) -> bool:
    """Whether the experts are linears with a weight; other libraries replace them."""
    experts = getattr(block, what.experts, None)
    if not isinstance(experts, nn.ModuleList):
        return False
    first = next(iter(experts), None)
    return isinstance(getattr(getattr(first, what.down, None), "weight", None), nn.Parameter)


def _adapted(path: str, block: nn.Module, what: _Description, values: bool) -> Callable[[], None]:
    experts = getattr(block, what.experts)
    activation = _activation(path, experts[0], what)
    before = block.__dict__.get("forward")
    example = _example(experts[0], what) if values else None
    expected = None if example is None else _result(block, example)
    stacked = StackedExperts(list(experts), what, str(activation), values)

    def undo() -> None:
        setattr(block, what.experts, experts)
        if before is None:
            block.__dict__.pop("forward", None)
        else:
            block.forward = before

    setattr(block, what.experts, stacked)
    block.forward = types.MethodType(what.forward, block)
    try:
        if example is not None:
            _compare(path, block, expected, _result(block, example))
    except BaseException:
        undo()
        raise
    return undo


def _stacked(
    experts: Sequence[nn.Module], linears: Sequence[str], part: str, values: bool
) -> nn.Parameter | None:
    """One parameter ``[E, ...]`` of the same part of some linears of every expert.

    The linears become views of it, so that no value is held twice; without values it is on the
    meta device.
    """
    rows: list[list[nn.Parameter | None]] = [
        [getattr(getattr(expert, name), part) for name in linears] for expert in experts
    ]
    given = [value for row in rows for value in row if value is not None]
    if not given:
        return None
    shapes = {tuple(None if value is None else value.shape for value in row) for row in rows}
    kinds = {(value.dtype, value.device) for value in given}
    if len(given) < len(rows) * len(linears) or len(shapes) > 1 or len(kinds) > 1:
        raise CaptureError(
            f"{type(experts[0]).__name__}.{linears[0]}",
            f"experts whose {part} differs in shape or dtype, or is missing in some",
            "experts that are alike",
            "leave the class unregistered",
        )
    held: list[torch.Tensor] = [value.to("meta") for value in given] if not values else [*given]
    each = [held[at : at + len(linears)] for at in range(0, len(held), len(linears))]
    whole = torch.stack([torch.cat([v.detach() for v in row]) for row in each])
    for place, row in enumerate(each):
        start = 0
        for value in row:
            if not value.is_meta:
                value.data = whole[place, start : start + len(value)]
            start += len(value)
    return nn.Parameter(whole, requires_grad=False)


def _activation(path: str, expert: Any, what: _Description) -> Activation:
    """The function between an expert's products, told by its values."""
    names = [name for name in (what.gate, what.up, what.down) if name is not None]
    missing = [n for n in names if not isinstance(getattr(expert, n, None), nn.Linear)]
    if missing:
        raise CaptureError(
            path,
            f"{type(expert).__name__} has no linear {missing[0]}",
            f"experts of the linears {', '.join(names)}",
            "name its linears in register_experts",
        )

    found = recognise_expert(expert, what.gate, what.up, what.down)
    if found is None or found.interleaved:
        raise CaptureError(
            path,
            f"{type(expert).__name__} computes something else between its products",
            "one of silu, gelu, relu and their gated forms",
            "leave the class unregistered",
        )
    return found


def _example(expert: nn.Module, what: _Description) -> torch.Tensor | None:
    """Hidden states to compare with; None where the experts have no values."""
    weight = getattr(expert, what.up).weight
    if weight.is_meta:
        return None
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, _TOKENS, weight.shape[1], generator=generator)
    return x.to(weight.device, weight.dtype)


def _result(block: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a block returns in evaluation mode."""
    training = [module for module in block.modules() if module.training]
    block.eval()
    try:
        with torch.no_grad():
            leaves = torch.utils._pytree.tree_leaves(block(x.clone()))
    finally:
        for module in training:
            module.training = True
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _compare(path: str, block: nn.Module, expected: Any, found: list[torch.Tensor]) -> None:
    shapes = [tuple(value.shape) for value in expected], [tuple(value.shape) for value in found]
    apart = 0.0 if shapes[0] == shapes[1] else float("inf")
    for one, other in zip(expected, found, strict=False):
        if one.shape == other.shape and one.numel():
            scale = one.double().norm().clamp_min(1e-30)
            apart = max(apart, float((one.double() - other.double()).norm() / scale))
    bound = min((_CLOSE.get(value.dtype, 0.0) for value in expected), default=0.0)
    if not apart <= bound:
        raise CaptureError(
            path,
            f"the registered forward of {type(block).__name__} is {apart:.1e} away from the class's"
            " own on random input",
            f"at most {bound:.0e}",
            "correct the forward given to register_experts",
        )
