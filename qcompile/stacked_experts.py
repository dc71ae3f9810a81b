"""The experts of a registered block as one module.

Comes in: a list of experts, the names of their linears. Goes out: a module with all their matrices
in a few parameters, whose forward is one node of a trace.
Always holds: no value is held twice; the order is output rows first, gate rows before up rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from qcompile.errors import CaptureError
from qcompile.ops_experts import moe


class StackedExperts(nn.Module):
    """All experts of a block: two parameters, output rows first, gate rows before up rows.

    Attributes:
        activation: text of the function between the products.
    """

    def __init__(
        self,
        experts: Sequence[nn.Module],
        gate: str | None,
        up: str,
        down: str,
        activation: str,
        values: bool,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.has_gate = gate is not None
        inner = [name for name in (gate, up) if name is not None]
        up = "gate_up_proj" if self.has_gate else "up_proj"
        for name, linears in ((up, inner), ("down_proj", [down])):
            for part, suffix in (("weight", ""), ("bias", "_bias")):
                self.register_parameter(f"{name}{suffix}", _stacked(experts, linears, part, values))

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The weighted sums ``[T, H]`` of what the chosen experts make of each token."""
        up = self.gate_up_proj if self.has_gate else self.up_proj
        bias = self.gate_up_proj_bias if self.has_gate else self.up_proj_bias
        return moe(  # type: ignore[no-any-return]
            x, ids, weights, up, self.down_proj, bias, self.down_proj_bias, self.activation, False
        )


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
