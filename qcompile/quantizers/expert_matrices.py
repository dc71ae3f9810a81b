"""Experts in three-dimensional parameters, as matrices to quantize.

Comes in: a model with experts modules. Goes out: their parameters, matrix by matrix; what each
matrix is multiplied with.
Always holds: a matrix has output rows first and gate rows before up rows, whichever way the module
keeps it; both parameters of a module are quantized or none; routing is never looked into.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from qcompile.experts import ExpertsModule, experts_modules
from qcompile.quantizers.settings import Settings
from qcompile.spec import Role


@dataclass(frozen=True)
class FloatExperts:
    """One parameter of an experts module.

    Attributes:
        name: the parameter.
        module: the module that holds it.
        role: which matrices these are.
        described: what the module computes.
    """

    name: str
    module: nn.Module
    role: Role
    described: ExpertsModule

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The module whose calls are watched."""
        return (self.module,)

    @property
    def key(self) -> str:
        """Name of the parameter in its module."""
        return self.name.rpartition(".")[2]

    @property
    def count(self) -> int:
        """How many experts there are."""
        return len(self.module.get_parameter(self.key))

    @property
    def size(self) -> int:
        """How many values the parameter has."""
        return self.module.get_parameter(self.key).numel()

    @property
    def shape(self) -> tuple[int, int]:
        """N and K of one matrix."""
        _, rows, columns = self.module.get_parameter(self.key).shape
        return (columns, rows) if self.described.transposed else (rows, columns)

    def member(self, expert: int) -> str:
        """What to call the matrix of one expert."""
        return f"{self.name}[{expert}]"

    def matrix(self, expert: int) -> torch.Tensor:
        """The float matrix ``[N, K]`` of one expert."""
        stored = self._stored(expert)
        return stored[self._order(len(stored))] if self._in_turns else stored

    def put(self, expert: int, values: torch.Tensor) -> None:
        """Give one expert other values."""
        stored = self._stored(expert)
        if self._in_turns:
            stored[self._order(len(stored))] = values.to(stored.dtype)
        else:
            stored.copy_(values)

    def inputs(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """What the matrix of one expert is multiplied with, for tokens ``[T, H]``."""
        if self.role != "down":
            return x
        up = self._parameter(self.described.up)[expert].detach()
        up = up.t() if self.described.transposed else up
        bias = self.described.up_bias
        given = None if bias is None else self._parameter(bias)[expert]
        return self.described.activation(functional.linear(x, up, given))

    @property
    def _in_turns(self) -> bool:
        return self.role == "gate_up" and self.described.activation.interleaved

    def _stored(self, expert: int) -> torch.Tensor:
        stored = self._parameter(self.name)[expert].detach()
        return stored.t() if self.described.transposed else stored

    def _parameter(self, name: str) -> torch.Tensor:
        return self.module.get_parameter(name.rpartition(".")[2])

    @staticmethod
    def _order(rows: int) -> torch.Tensor:
        return torch.arange(rows).view(-1, 2).t().reshape(-1)


def chosen_experts(
    model: nn.Module, settings: Settings, kept: Collection[str] = ()
) -> tuple[FloatExperts, ...]:
    """The parameters of the experts modules to quantize.

    Args:
        model: not changed.
        settings: what to leave out, by the module's path.
        kept: parameters that stay in float; the other one of the same module stays too.
    """
    found: list[FloatExperts] = []
    for described in experts_modules(model):
        skipped = any(pattern.fullmatch(described.path) for pattern in settings.skip)
        if skipped or {described.up, described.down} & set(kept):
            continue
        module = model.get_submodule(described.path)
        up: Role = "gate_up" if described.activation.gated else "up"
        found.append(FloatExperts(described.up, module, up, described))
        found.append(FloatExperts(described.down, module, "down", described))
    return tuple(found)


def routers(model: nn.Module) -> set[str]:
    """Paths of the linears beside experts that weigh them: one row an expert, or a single row."""
    found: set[str] = set()
    for described in experts_modules(model):
        count = len(model.get_parameter(described.up))
        block = described.path.rpartition(".")[0]
        for name, module in model.get_submodule(block).named_children():
            if isinstance(module, nn.Linear) and module.out_features in (1, count):
                found.add(f"{block}.{name}" if block else name)
    return found


def tokens_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens ``[T, H]`` and chosen experts ``[T, k]`` of a call of an experts module."""
    x, ids, *_ = (*args, *kwargs.values())
    return x, ids
