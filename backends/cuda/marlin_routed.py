"""The op ``qcompile::marlin_experts``: both products of every chosen expert.

Comes in: tokens, parts in the layout ``cuda.marlin_experts.DTYPE``, choices and shares. Goes out:
for each token the weighted sum of what its experts made of it.
Always holds: as in ``marlin_call``; no size depends on data, so that a CUDA graph can hold the
call. Padding of rows is a number of tokens that does not exist, which the operator skips.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from qcompile.activation import Activation
from qcompile.backends.cuda import schemas
from qcompile.backends.cuda.installed import overload
from qcompile.backends.cuda.marlin_call import (
    arguments,
    operands,
    operator_for,
    prepared,
    workspace,
)
from qcompile.backends.cuda.marlin_layout import ORDER_OF
from qcompile.backends.cuda.routing import Routing, by_expert
from qcompile.ops import weight_of
from qcompile.spec import AffineSpec, ExpertsSpec, RoleSpec

# Rows that one block of threads takes. A smaller one wastes fewer rows on padding, a larger one
# reads weights less often: the smallest that an expert's share of the rows nearly fills.
_BLOCKS = (8, 16, 32, 48, 64)
_FILLED = 0.9

_library = torch.library.Library("qcompile", "FRAGMENT")
_library.define(
    "marlin_experts(Tensor x, Tensor[] parts, str meaning, Tensor ids, Tensor weights,"
    " Tensor? up_bias, Tensor? down_bias, str activation) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def route(ids: torch.Tensor, count: int) -> Routing:
    """Sort choices by expert, in blocks that the operator takes."""
    share = ids.numel() / count
    block = next((b for b in _BLOCKS if share / b < _FILLED), _BLOCKS[-1])
    return by_expert(ids, count, block)


def _experts(
    x: torch.Tensor,
    parts: list[torch.Tensor],
    meaning: str,
    ids: torch.Tensor,
    weights: torch.Tensor,
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    activation: str,
) -> torch.Tensor:
    packed = weight_of(parts, meaning)
    spec = packed.spec
    assert isinstance(spec, ExpertsSpec)
    if not ids.numel():
        return x.new_zeros(x.shape)
    call = _Call(packed.parts, route(ids, packed.shape[0]), weights.float().contiguous(), spec)
    top = ids.shape[1]
    up, start = [], 0
    for role in sorted((r for r in spec.roles if r.role != "down"), key=lambda r: r.role):
        bias = None if up_bias is None else up_bias[:, start : start + role.rows]
        up.append(call.product(x, role, bias, top, shared=False))
        start += role.rows
    both = up[0] if len(up) == 1 else torch.cat(up, dim=1)
    hidden = Activation.parse(activation)(both.float()).to(x.dtype)
    [down] = [role for role in spec.roles if role.role == "down"]
    rows = call.product(hidden, down, down_bias, 1, shared=True)
    return rows.reshape(*ids.shape, down.rows).sum(1)


@dataclass(frozen=True)
class _Call:
    """What both products share."""

    parts: Mapping[str, torch.Tensor]
    routing: Routing
    shares: torch.Tensor
    spec: ExpertsSpec

    def product(
        self, x: torch.Tensor, role: RoleSpec, bias: torch.Tensor | None, top: int, shared: bool
    ) -> torch.Tensor:
        """One row for each choice, ``[T k, N]``.

        Args:
            x: ``[T k / top, K]``.
            role: whose matrices.
            bias: ``[E, N]`` or None.
            top: choices that read one row of x.
            shared: whether results are multiplied by the shares.
        """
        weight, scale, zero = (
            self.parts.get(f"{role.role}.{name}") for name in ("weight", "scale", "zero")
        )
        assert weight is not None
        assert scale is not None
        kinds = [_kind(one) for one in self.spec.roles]
        found = operator_for(schemas.EXPERTS, x.dtype, scale.dtype, kinds)
        values = operands(weight, scale, zero, bias, ORDER_OF[role.layout].bits)
        a = prepared(x, None, weight.shape[1] * 16)
        values |= {"a": a, "workspace": workspace(a.device), "top_k": top}
        values |= {"size_m": a.shape[0], "size_k": a.shape[1]}
        values |= {"size_n": scale.shape[-1] * scale.shape[-2], "mul_topk_weights": shared}
        values |= {"sorted_token_ids": self.routing.rows, "expert_ids": self.routing.experts}
        values |= {"num_tokens_past_padded": self.routing.used, "topk_weights": self.shares}
        values |= {"moe_block_size": self.routing.block}
        wide: torch.Tensor = overload(found)(*arguments(found, values))
        return wide[:, : role.rows]


def _kind(role: RoleSpec) -> tuple[int, bool]:
    assert isinstance(role.spec, AffineSpec)
    return ORDER_OF[role.layout].bits, role.spec.form == "zero"


def _experts_shape(x: torch.Tensor, *rest: object) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_library.impl("marlin_experts", _experts, "CompositeExplicitAutograd")
torch.library.register_fake("qcompile::marlin_experts", _experts_shape, lib=_library)

marlin_experts = torch.ops.qcompile.marlin_experts.default
