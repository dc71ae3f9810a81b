"""Attention in bfloat16: two products of oneDNN with a softmax between them.

Before: ``scaled_dot_product_attention(q, k, v, ...)``. After: ``qcompile_cpu.attention(q, k, v,
...)``, whose products run on the processor's units for bfloat16, which torch's fused kernel for
CPUs uses less well: for one query, too. Always holds: queries are taken in runs, so that memory
stays bounded; other dtypes, dropout and inputs that need gradients stay with torch.

It belongs to the numerics ``fast``: scores are rounded to bfloat16 before the softmax, as in the
eager attention of transformers, where torch's kernel keeps float32. The result is 0.3 % off where
scores spread by 1 (torch's 0.2 %), and 1 % where they spread by 16 (torch's 0.1 %).
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional

from qcompile.program import Program

_SCORES = 1 << 24  # scores at once: 32 MB, and 64 MB as float32
_NAMES = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


@torch.library.custom_op("qcompile_cpu::attention", mutates_args=())
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """``softmax(q @ k.T * scale + mask) @ v`` as torch defines it.

    Args:
        q: ``[B, H, M, D]``.
        k, v: ``[B, G, L, D]`` and ``[B, G, L, E]``; H is a multiple of G. B may be 1 here.
        mask: added to the scores, or True where a key is seen; broadcasts to ``[B, H, M, L]``.
        is_causal: query i sees keys 0 to i.
        scale: ``1 / sqrt(D)`` when None.

    Returns:
        ``[B, H, M, E]``; zeros for queries that see nothing.
    """
    b, h, m, d = q.shape
    g, length = k.shape[1], k.shape[2]
    factor = 1 / math.sqrt(d) if scale is None else scale
    keys = k.transpose(-1, -2).expand(b, g, d, length).reshape(b * g, d, length)
    values = v.expand(b, g, length, v.shape[-1]).reshape(b * g, length, v.shape[-1])
    if mask is not None:
        mask = mask.expand(b, h, m, length)
    out = q.new_empty((b, h, m, v.shape[-1]))
    run = max(1, _SCORES // max(1, b * h * length))
    for start in range(0, m, run):
        rows = slice(start, min(start + run, m))
        count = rows.stop - start
        # The queries of the heads that share keys become rows of one product.
        some = q[:, :, rows].reshape(b * g, h // g * count, d)
        scores = torch.bmm(some, keys).view(b, h, count, length).float().mul_(factor)
        if mask is not None:
            here = mask[:, :, rows]
            if here.dtype == torch.bool:
                scores.masked_fill_(here.logical_not(), -math.inf)
            else:
                scores += here
        if is_causal:
            seen = torch.ones(m, length, dtype=torch.bool).tril()[rows]
            scores.masked_fill_(seen.logical_not(), -math.inf)
        shares = torch._safe_softmax(scores, -1).to(q.dtype)
        sums = torch.bmm(shares.view(b * g, h // g * count, length), values)
        out[:, :, rows] = sums.view(b, h, count, v.shape[-1])
    return out


@attention.register_fake
def _shape(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


_OP = torch.ops.qcompile_cpu.attention.default


@dataclass(frozen=True)
class SplitAttention:
    """See the module's text."""

    name: str = "cpu.attention"

    def run(self, program: Program) -> int:
        """Rewrite attention in bfloat16; the number of nodes that changed."""
        nodes = program.nodes([functional.scaled_dot_product_attention])
        changed = [node for node in nodes if _fits(node)]
        for node in changed:
            q, k, v, mask, _, causal, scale, _ = _arguments(node)
            fewer = _unrepeated(k), _unrepeated(v)
            if k in fewer or v in fewer:
                fewer = k, v  # one without the other would have another number of heads
            call = (q, *fewer, mask, causal, scale)
            with program.graph.inserting_before(node):
                program.replace(node, program.graph.call_function(_OP, call))
            for repeated in dict.fromkeys((k, v)):
                _drop_unused(program.graph, repeated)
        return len(changed)


def _unrepeated(node: fx.Node) -> fx.Node:
    """Keys or values before they were repeated for the heads that share them: the op needs no copy.

    Models write ``x[:, :, None, :, :].expand(b, g, times, l, d).reshape(b, g * times, l, d)``.
    """
    place = node
    for method in ("reshape", "expand"):
        if place.op != "call_method" or place.target != method:
            return node
        place = place.args[0]  # type: ignore[assignment]
    every = slice(None)
    if place.target != operator.getitem or place.args[1] != (every, every, None, every, every):
        return node
    base, before, after = place.args[0], _value(place.args[0]), _value(node)
    if before is None or after is None or before.dim() != 4 or after.dim() != 4:
        return node
    kept = all(statically_known_true(before.shape[i] == after.shape[i]) for i in (0, 2, 3))
    return base if kept else node  # type: ignore[return-value]


def _drop_unused(graph: fx.Graph, node: fx.Node) -> None:
    """Erase a node that nothing reads, and what only it read, as far as views go."""
    while not node.users and (node.target in ("reshape", "expand", operator.getitem)):
        before = node.args[0]
        graph.erase_node(node)
        if not isinstance(before, fx.Node) or before.op == "placeholder":
            return
        node = before


def _arguments(node: fx.Node) -> tuple[Any, ...]:
    """query, key, value, mask, dropout, is_causal, scale, enable_gqa."""
    defaults: dict[str, Any] = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False}
    defaults |= {"scale": None, "enable_gqa": False}
    names = ("query", "key", "value", *_NAMES)
    given = defaults | dict(zip(names, node.args, strict=False)) | node.kwargs
    return tuple(given[name] for name in names)


def _fits(node: fx.Node) -> bool:
    q, k, v, _, dropout, causal, *_ = given = _arguments(node)
    values = [value for value in map(_value, (q, k, v)) if value is not None]
    if len(values) < 3 or values[0].dtype != torch.bfloat16:
        return False
    if any(value.dim() != 4 or value.requires_grad for value in values):
        return False
    if not isinstance(dropout, (int, float)) or dropout or not isinstance(causal, bool):
        return False
    return isinstance(given[6], (float, int, type(None)))


def _value(node: object) -> torch.Tensor | None:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None
