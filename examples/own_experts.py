"""A mixture of experts of one's own as one kernel a layer.

    python examples/own_experts.py

A block that loops over its experts cannot be traced as one op. Described once, the loop becomes a
call; before anything is changed, qcompile compares the two on random input.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

import qcompile


class Expert(nn.Module):
    """A gated MLP."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden, inner, bias=False)
        self.w2 = nn.Linear(inner, hidden, bias=False)
        self.w3 = nn.Linear(hidden, inner, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, H]`` to ``[T, H]``."""
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """Eight experts, two of them for each token, in a loop."""

    top_k = 2

    def __init__(self, hidden: int = 256, inner: int = 512, count: int = 8) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, count, bias=False)
        self.experts = nn.ModuleList(Expert(hidden, inner) for _ in range(count))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[B, T, H]`` to ``[B, T, H]``."""
        x = hidden.flatten(0, -2)
        weights, ids = self.gate(x).softmax(-1).topk(self.top_k, -1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(ids == number)
            out.index_add_(0, token, expert(x[token]) * weights[token, place, None])
        return out.view_as(hidden)


def forward(self: Block, hidden: torch.Tensor) -> torch.Tensor:
    """The same without the loop."""
    x = hidden.flatten(0, -2)
    weights, ids = self.gate(x).softmax(-1).topk(self.top_k, -1)
    return self.experts(x, ids, weights).view_as(hidden)


def main() -> None:
    """Describe the block, quantize it to 8 bits, compare with the floats."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block()).eval()
    hidden = torch.randn(1, 12, 256)
    with torch.no_grad():
        expected = model(hidden)

    qcompile.register_experts(Block, forward, gate="w1", up="w3", down="w2")
    qcompile.optimize(model, scheme="rtn", bits=8, emitter="eager", verify=True)
    print(model.qcompile.plan)
    difference = (model(hidden) - expected).norm() / expected.norm()
    print(f"relative L2 difference from the floats, which is what 8 bits lose: {difference:.1e}")


if __name__ == "__main__":
    main()
