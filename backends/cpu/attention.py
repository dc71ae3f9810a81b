"""Attention as one native call, whose scores never leave the caches.

Before: ``scaled_dot_product_attention(q, k, v, ...)``. After: ``qcompile_cpu.attention(q, k, v,
...)``, which reads each key and value once for the heads that share it, where it lies in the cache,
and skips keys that nobody sees. Always holds: scores and sums are float32, as in torch's fused
kernel for CPUs; dropout, odd columns and inputs that need gradients stay with torch.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from qcompile.backends.cpu.panel import library
from qcompile.program import Program
from qcompile.sizes import known_true

_NAMES = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_LANES = 16

# softmax(q @ k.T * scale + mask) @ v, as torch defines it. q [B, H, M, D]; k [B, G, L, D] and v
# [B, G, L, E]: H is a multiple of G, D and E of 16, B may be 1. The mask is added to the scores, or
# True where a key is seen, and broadcasts to [B, H, M, L]; is_causal: query i sees keys 0 to i.
# Returns [B, H, M, E], a query's heads together in memory; zeros for queries that see nothing.
library.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, bool is_causal, float scale) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@torch.library.register_fake("qcompile_cpu::attention")
def _shape(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float,
) -> torch.Tensor:
    b, h, m, _ = q.shape
    return q.new_empty((b, m, h, v.shape[-1])).transpose(1, 2)


_OP = torch.ops.qcompile_cpu.attention.default


@dataclass(frozen=True)
class NativeAttention:
    """See the module's text."""

    name: str = "cpu.attention"

    def run(self, program: Program) -> int:
        """Rewrite attention; the number of nodes that changed."""
        nodes = program.nodes([functional.scaled_dot_product_attention])
        changed = [node for node in nodes if _fits(node)]
        for node in changed:
            q, k, v, mask, _, causal, scale, _ = _arguments(node)
            if scale is None:
                scale = 1 / math.sqrt(_value(q).shape[-1])  # type: ignore[union-attr]
            fewer = _unrepeated(k), _unrepeated(v)
            if k in fewer or v in fewer:
                fewer = k, v  # one without the other would have another number of heads
            call = (q, *fewer, _unexpanded(mask), causal, scale)
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
    kept = all(known_true(before.shape[i] == after.shape[i]) for i in (0, 2, 3))
    return base if kept else node  # type: ignore[return-value]


def _unexpanded(mask: Any) -> Any:
    """A mask before it was expanded, which the op does: Inductor copies a view for every layer."""
    while isinstance(mask, fx.Node) and mask.op == "call_method" and mask.target == "expand":
        mask = mask.args[0]
    return mask


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
    q, k, v, mask, dropout, causal, scale, _ = _arguments(node)
    values = [value for value in map(_value, (q, k, v)) if value is not None]
    if len(values) < 3 or any(value.dim() != 4 or value.requires_grad for value in values):
        return False
    if values[0].dtype not in _DTYPES or len({value.dtype for value in values}) > 1:
        return False
    if not _share(*values):
        return False
    columns = (values[0].shape[-1], values[2].shape[-1])
    # Symbols too: a cache's columns are one until something pins it.
    if not all(known_true(size > 0 and size % _LANES == 0) for size in columns):
        return False
    if not isinstance(dropout, (int, float)) or dropout or not isinstance(causal, bool):
        return False
    return _is_mask(mask) and isinstance(scale, (float, int, type(None)))


def _share(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether heads share keys and values as the op has it; torch lets each of them be repeated."""
    groups = all(map(known_true, (k.shape[1] > 0, k.shape[1] == v.shape[1])))
    batches = all(
        known_true(x.shape[0] == q.shape[0]) or known_true(x.shape[0] == 1) for x in (k, v)
    )
    return groups and batches and known_true(q.shape[1] % k.shape[1] == 0)


def _is_mask(mask: object) -> bool:
    if mask is None:
        return True
    value = _value(mask)
    known = value is not None and value.dim() <= 4 and not value.requires_grad
    return known and value.dtype in (torch.bool, *_DTYPES)  # type: ignore[union-attr]


def _value(node: object) -> torch.Tensor | None:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None
