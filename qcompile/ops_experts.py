"""The canonical ops of a mixture of experts: what every kernel must compute.

Comes in: tokens, the experts chosen for each with their weights, and all experts. Goes out: for
each token the weighted sum of what its experts made of it.
Always holds: routing is the model's own and comes in as data; sums are taken in float32, with the
routing weights in float32, and rounded once.

``qcompile::moe`` stands for the float op that capture leaves in a graph; ``qcompile::experts`` is
the same on packed weights. Both decode or touch only the experts that some token has chosen.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from qcompile.activation import Activation
from qcompile.experts_layout import role_weight
from qcompile.ops import decode_meaning, weight_of
from qcompile.spec import ExpertsSpec, Role

_library = torch.library.Library("qcompile", "FRAGMENT")
_library.define(
    "moe(Tensor x, Tensor ids, Tensor weights, Tensor up, Tensor down, Tensor? up_bias,"
    " Tensor? down_bias, str activation, bool transposed) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "experts(Tensor x, Tensor[] parts, str meaning, Tensor ids, Tensor weights, Tensor? up_bias,"
    " Tensor? down_bias, str activation) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
# The matrices of one expert, float32: up (gate rows first) [2 I, H] or [I, H], down [H, I].
Matrices = Callable[[int], tuple[torch.Tensor, torch.Tensor]]


def _combine(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    count: int,
    matrices: Matrices,
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    activation: Activation,
) -> torch.Tensor:
    if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < count):
        raise IndexError(f"experts: a chosen expert is outside 0..{count - 1}")
    wide, out = x.to(torch.float32), x.new_zeros(x.shape, dtype=torch.float32)
    for expert in torch.unique(ids).tolist():
        tokens, places = torch.where(ids == expert)
        up, down = matrices(expert)
        up_bias, down_bias = (None if b is None else b[expert].to(torch.float32) for b in biases)
        hidden = activation(functional.linear(wide[tokens], up, up_bias))
        result = functional.linear(hidden, down, down_bias)
        share = weights[tokens, places].to(torch.float32)
        out.index_add_(0, tokens, result * share[:, None])
    return out.to(x.dtype)


def _moe(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    activation: str,
    transposed: bool,
) -> torch.Tensor:
    def matrices(expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        pair = up[expert].to(torch.float32), down[expert].to(torch.float32)
        return (pair[0].t(), pair[1].t()) if transposed else pair

    chosen = Activation.parse(activation)
    return _combine(x, ids, weights, len(up), matrices, (up_bias, down_bias), chosen)


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
    weight = weight_of(parts, meaning)
    assert isinstance(weight.spec, ExpertsSpec)
    roles = {role.role: role for role in weight.spec.roles}

    def matrix(names: tuple[Role, ...], expert: int) -> torch.Tensor:
        found = [role_weight(weight, roles[n], expert).dequantize() for n in names if n in roles]
        return found[0] if len(found) == 1 else torch.cat(found)

    def matrices(expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        return matrix(("gate_up", "gate", "up"), expert), matrix(("down",), expert)

    chosen = Activation.parse(activation)
    return _combine(x, ids, weights, weight.shape[0], matrices, (up_bias, down_bias), chosen)


def _experts_shape(
    x: torch.Tensor, parts: list[torch.Tensor], meaning: str, *rest: object
) -> torch.Tensor:
    spec, _, _ = decode_meaning(meaning)
    assert isinstance(spec, ExpertsSpec)
    columns = next(role.columns for role in spec.roles if role.role != "down")
    torch._check(
        x.shape[-1] == columns, lambda: f"experts: x has {x.shape[-1]} columns, w {columns}"
    )
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _moe_shape(x: torch.Tensor, *rest: object) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_library.impl("moe", _moe, "CompositeExplicitAutograd")
_library.impl("experts", _experts, "CompositeExplicitAutograd")
torch.library.register_fake("qcompile::moe", _moe_shape, lib=_library)
torch.library.register_fake("qcompile::experts", _experts_shape, lib=_library)

moe = torch.ops.qcompile.moe.default
experts = torch.ops.qcompile.experts.default
