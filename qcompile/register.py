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
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from qcompile.activation import Activation, recognise_expert
from qcompile.errors import CaptureError, OptionError
from qcompile.spec import Role
from qcompile.stacked_experts import StackedExperts

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
# The lists of experts of the model that is being prepared, by path.
_ROLES_OF_LISTS: ContextVar[Mapping[str, Mapping[str, Role]]] = ContextVar(
    "lists", default=types.MappingProxyType({})
)


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
    names = {"experts": experts, "gate": gate, "up": up, "down": down}
    linears = [name for name in (gate, up, down) if name is not None]
    for key, name in names.items():
        if not (isinstance(name, str) and name) and not (key == "gate" and name is None):
            raise OptionError(
                f"register_experts({key}={name!r})",
                "no name of an attribute",
                "the name of an attribute" + (", or None" if key == "gate" else ""),
                "correct it",
            )
    if len(set(linears)) < len(linears):
        raise OptionError(
            "register_experts",
            f"one linear in two places: {', '.join(linears)}",
            "different names for gate, up and down",
            "correct them",
        )
    _KNOWN[cls] = _Description(forward, experts, gate, up, down)


def roles_at(path: str) -> Mapping[str, Role] | None:
    """What part each linear plays in an expert of the list at ``path``.

    Only known while a model with such a registered block is being prepared; None otherwise, and
    for every other list: the names given for one class say nothing of another.
    """
    return _ROLES_OF_LISTS.get().get(path)


def _roles(what: _Description) -> dict[str, Role]:
    found: dict[str, Role] = {what.up: "up", what.down: "down"}
    if what.gate is not None:
        found[what.gate] = "gate"
    return found


@contextlib.contextmanager
def described(model: nn.Module) -> Iterator[None]:
    """Let the model look as it would when compiled, without values, inside the block."""
    with adapted(model, values=False) as undo:
        try:
            yield
        finally:
            for step in reversed(undo):
                step()


@contextlib.contextmanager
def adapted(model: nn.Module, values: bool = True) -> Iterator[list[Callable[[], None]]]:
    """``adapt``, and ``roles_at`` knows the model's lists inside the block."""
    lists = {
        f"{path}.{what.experts}" if path else what.experts: _roles(what)
        for path, module in model.named_modules()
        if (what := _KNOWN.get(type(module))) is not None
    }
    token = _ROLES_OF_LISTS.set(lists)
    try:
        yield adapt(model, values)
    finally:
        _ROLES_OF_LISTS.reset(token)


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
    stacked = StackedExperts(list(experts), what.gate, what.up, what.down, str(activation), values)

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
