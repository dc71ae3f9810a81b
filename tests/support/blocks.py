"""Two classic blocks that loop over their experts, and what they compute without a loop.

The first is written the way the Mixtral block of transformers 4 was, the second the way DeepSeek's
published code is: its control flow depends on data, so that no trace goes through it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

HIDDEN, INNER, EXPERTS, CHOSEN = 64, 32, 4, 2


class Expert(nn.Module):
    """Mixtral's names."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.w1 = nn.Linear(HIDDEN, INNER, bias=bias)
        self.w2 = nn.Linear(INNER, HIDDEN, bias=bias)
        self.w3 = nn.Linear(HIDDEN, INNER, bias=bias)
        self.act_fn = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.w2(self.act_fn(self.w1(x)) * self.w3(x))
        return result


class Looping(nn.Module):
    """Every expert is asked for its tokens; returns the router's outputs too."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList([Expert(bias) for _ in range(EXPERTS)])

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = hidden.view(-1, hidden.shape[-1])
        logits = self.gate(x)
        weights = functional.softmax(logits, dim=1, dtype=torch.float)
        weights, ids = torch.topk(weights, CHOSEN, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(x)
        mask = functional.one_hot(ids, num_classes=EXPERTS).permute(2, 1, 0)
        for number, expert in enumerate(self.experts):
            place, token = torch.where(mask[number])
            out.index_add_(0, token, expert(x[None, token][0]) * weights[token, place, None])
        return out.view_as(hidden), logits


def without_loop(self: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = hidden.view(-1, hidden.shape[-1])
    logits = self.gate(x)
    weights = functional.softmax(logits, dim=1, dtype=torch.float)
    weights, ids = torch.topk(weights, CHOSEN, dim=-1)
    weights = weights / weights.sum(dim=-1, keepdim=True)
    return self.experts(x, ids, weights).view_as(hidden), logits


class GatedMLP(nn.Module):
    def __init__(self, inner: int = INNER) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, inner, bias=False)
        self.up_proj = nn.Linear(HIDDEN, inner, bias=False)
        self.down_proj = nn.Linear(inner, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class Sorting(nn.Module):
    """Tokens are sorted by expert, and counted in numpy; one expert sees every token."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList([GatedMLP() for _ in range(EXPERTS)])
        self.shared_experts = GatedMLP(2 * INNER)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.gate(x).softmax(dim=-1, dtype=torch.float32)
        weights, ids = torch.topk(scores, CHOSEN, dim=-1, sorted=False)
        return ids, weights * 1.5

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        ids, weights = self.route(hidden.view(-1, hidden.shape[-1]))
        y: torch.Tensor = self._infer(hidden.view(-1, hidden.shape[-1]), ids, weights)
        result: torch.Tensor = y.view_as(hidden) + self.shared_experts(hidden)
        return result

    def _infer(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        counts = ids.new_zeros((ids.shape[0], EXPERTS)).scatter_(1, ids, 1).sum(dim=0)
        order = ids.view(-1).argsort()
        tokens = x[order // ids.shape[1]]
        outputs, start = [], 0
        for number, count in enumerate(counts.cpu().numpy()):
            if count == 0:
                continue
            outputs.append(self.experts[number](tokens[start : start + count]))
            start += count
        sorted_out = torch.cat(outputs)
        out = torch.empty_like(sorted_out)
        out[order] = sorted_out
        out = out.view(*ids.shape, -1).type(weights.dtype) * weights.unsqueeze(-1)
        total: torch.Tensor = out.sum(dim=1).type(x.dtype)
        return total


def without_sorting(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    x = hidden.view(-1, hidden.shape[-1])
    ids, weights = self.route(x)
    y: torch.Tensor = self.experts(x, ids, weights).view_as(hidden) + self.shared_experts(hidden)
    return y


class Stack(nn.Module):
    """Two blocks of one kind between an input and an output projection."""

    def __init__(self, block: type[nn.Module], **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.proj = nn.Linear(HIDDEN, HIDDEN)
        self.layers = nn.ModuleList([block(**options) for _ in range(2)])
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.proj(x)
        for layer in self.layers:
            y = layer(x)
            x = x + (y[0] if isinstance(y, tuple) else y)
        result: torch.Tensor = self.out(x)
        return result
