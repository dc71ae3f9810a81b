"""The function between the two products of an expert.

Comes in: a module's own function, or text. Goes out: one of the functions that kernels know.
Always holds: a module's function is recognised by its values, not by its name; one that is not
known is never taken for another.

With a gate, the input of a function is ``[gate | up]`` along the last dimension, or their columns
in turns where ``interleaved`` says so.

>>> Activation.parse("gated silu")
Activation(function='silu', gated=True, interleaved=False, alpha=1.0, limit=inf)
>>> str(Activation("swiglu_oai", alpha=1.702, limit=7.0))
'gated swiglu_oai alpha=1.702 limit=7.0'
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn import functional

_PLAIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "identity": lambda x: x,
}
_CLOSE = 1e-6


@dataclass(frozen=True)
class Activation:
    """A function that kernels know.

    Attributes:
        function: ``silu``, ``gelu``, ``gelu_tanh``, ``relu``, ``relu2``, ``sigmoid``, ``tanh`` or
            ``identity``, of the gate where there is one, which is multiplied with up. Or
            ``swiglu_oai``: ``(up + 1) * gate * sigmoid(alpha * gate)``.
        gated: whether the input has a gate.
        interleaved: whether gate and up are columns in turns.
        alpha: see ``swiglu_oai``.
        limit: gate is at most this, up is between minus this and this, before anything else.
    """

    function: str
    gated: bool = True
    interleaved: bool = False
    alpha: float = 1.0
    limit: float = math.inf

    @staticmethod
    def parse(text: str) -> Activation:
        """The inverse of ``str``."""
        words = text.split()
        numbers = dict(word.split("=") for word in words if "=" in word)
        [function] = [w for w in words if "=" not in w and w not in ("gated", "interleaved")]
        return Activation(
            function,
            "gated" in words,
            "interleaved" in words,
            float(numbers.get("alpha", 1.0)),
            float(numbers.get("limit", math.inf)),
        )

    def __str__(self) -> str:
        words = [
            *(["gated"] if self.gated else []),
            *(["interleaved"] if self.interleaved else []),
            self.function,
            *([f"alpha={self.alpha}"] if self.alpha != 1.0 else []),
            *([f"limit={self.limit}"] if self.limit != math.inf else []),
        ]
        return " ".join(words)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The function of ``x``, whose last dimension is halved where there is a gate."""
        if not self.gated:
            return _PLAIN[self.function](x)
        gate, up = (x[..., ::2], x[..., 1::2]) if self.interleaved else x.chunk(2, dim=-1)
        if self.limit != math.inf:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        if self.function == "swiglu_oai":
            return (up + 1) * gate * torch.sigmoid(gate * self.alpha)
        return _PLAIN[self.function](gate) * up


def recognise(
    function: Callable[[torch.Tensor], torch.Tensor],
    gated: bool,
    alphas: tuple[float, ...] = (),
    limits: tuple[float, ...] = (),
) -> Activation | None:
    """The known function with the same values, None where there is none.

    Args:
        function: what a module computes between its two products.
        gated: whether its input has a gate.
        alphas: values that ``alpha`` may have.
        limits: values that ``limit`` may have.
    """
    generator = torch.Generator().manual_seed(0)
    # Some columns are beyond any limit in use.
    probe = torch.randn(256, 16, generator=generator) * torch.tensor([1.0, 20.0]).repeat(8)
    probe = torch.cat([probe, probe.roll(1, 1)])
    found = function(probe)
    for candidate in _candidates(gated, alphas, limits):
        expected = candidate(probe)
        if found.shape == expected.shape and torch.allclose(found, expected, _CLOSE, _CLOSE):
            return candidate
    return None


def recognise_expert(expert: nn.Module, gate: str | None, up: str, down: str) -> Activation | None:
    """The known function between an expert's products, None where there is none.

    Args:
        expert: computes ``down(act(gate(x)) * up(x))``; its weights are not looked at.
        gate: name of the linear behind the function; None where ``up`` is behind it.
        up: name of the other one.
        down: name of the last one.
    """

    def function(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1) if gate is not None else (x, x)
        answers = {gate: first, up: second, down: None}
        with contextlib.ExitStack() as stack:
            for name, answer in answers.items():
                if name is not None:
                    stack.enter_context(_answering(expert.get_submodule(name), answer))
            result: torch.Tensor = expert(second)
        return result

    with torch.no_grad():
        return recognise(function, gate is not None)


@contextlib.contextmanager
def _answering(linear: nn.Module, answer: torch.Tensor | None) -> Iterator[None]:
    """Let a linear return a given tensor, or what it is given, for a while."""
    linear.forward = lambda x: x if answer is None else answer
    try:
        yield
    finally:
        del linear.__dict__["forward"]


def _candidates(
    gated: bool, alphas: tuple[float, ...], limits: tuple[float, ...]
) -> Iterator[Activation]:
    if not gated:
        yield from (Activation(name, gated=False) for name in _PLAIN)
        return
    for limit in (math.inf, *limits):
        for interleaved in (False, True):
            plain = Activation("silu", True, interleaved, 1.0, limit)
            yield from (replace(plain, function=name) for name in _PLAIN)
            for alpha in (1.0, *alphas):
                yield replace(plain, function="swiglu_oai", alpha=alpha)
