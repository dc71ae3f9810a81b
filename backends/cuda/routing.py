"""Rows in the order of their experts, in blocks of one expert each.

Comes in: the experts chosen for every token. Goes out: a ``Routing``.
Always holds: no size depends on data and nothing waits for the device, so that a CUDA graph can
hold it; within an expert choices keep their order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Routing:
    """Rows in the order of their experts, each expert's padded to whole blocks.

    Attributes:
        rows: int32; which row of ``tokens * top`` stands at a place, their number where none does.
        experts: int32; the expert of every block.
        used: int32 ``[1]``; places in use.
        block: rows of a block.
    """

    rows: torch.Tensor
    experts: torch.Tensor
    used: torch.Tensor
    block: int


def by_expert(ids: torch.Tensor, count: int, block: int) -> Routing:
    """Sort choices by expert.

    Args:
        ids: ``[T, k]``, experts from 0 to ``count - 1``.
        count: number of experts.
        block: rows of a block.
    """
    flat = ids.reshape(-1).to(torch.int64)
    total = flat.numel()
    chosen = flat.new_zeros(count).scatter_add_(0, flat, torch.ones_like(flat))
    room = (chosen + block - 1) // block * block
    ends = room.cumsum(0)
    order = flat.argsort(stable=True)
    owners = flat[order]
    # A row's place: where its expert starts, and how many rows of that expert stand before it.
    shift = (ends - room) - (chosen.cumsum(0) - chosen)
    places = shift[owners] + torch.arange(total, device=flat.device)
    most = total + min(total, count) * (block - 1)
    capacity = -(-most // block) * block
    rows = flat.new_full((capacity,), total).scatter_(0, places, order)
    starts = torch.arange(0, capacity, block, device=flat.device)
    experts = torch.searchsorted(ends, starts, right=True).clamp_(max=count - 1)
    return Routing(rows.to(torch.int32), experts.to(torch.int32), ends[-1:].to(torch.int32), block)
