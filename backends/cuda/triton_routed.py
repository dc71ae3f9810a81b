"""The op ``qcompile::triton_experts``: both products of every chosen expert.

Comes in: tokens, parts in the layout ``cuda.p16_experts.DTYPE``, choices and shares. Goes out: for
each token the weighted sum of what its experts made of it.
Always holds: weights stay packed; an expert that no token chose costs nothing; no size depends on
data and nothing waits for the device, so that a CUDA graph can hold the call. Between the products
and before the last sum numbers are float32.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from qcompile.activation import Activation
from qcompile.backends.cuda import probe
from qcompile.backends.cuda.coding import Coding
from qcompile.backends.cuda.configs import Config, choose
from qcompile.backends.cuda.launch import OPTIONS, linear_constants, tile_options
from qcompile.backends.cuda.layouts import coded, groups_of
from qcompile.backends.cuda.operators import arch_at
from qcompile.backends.cuda.routing import Routing, by_expert
from qcompile.layout import layout_of
from qcompile.ops import decode_meaning
from qcompile.spec import ExpertsSpec, RoleSpec

# Outputs that one program adds up.
_ADDED = 512
# Rows of a block at most. Where single warps make the products, the addresses of more rows, which
# may lie anywhere, take registers that there are not.
_HIGHEST, _HIGHEST_BY_WARPS = 128, 64
_BY_GROUPS = ("sm90", "sm100")

_library = torch.library.Library("qcompile", "FRAGMENT")
_library.define(
    "triton_experts(Tensor x, Tensor[] parts, str meaning, Tensor ids, Tensor weights,"
    " Tensor? up_bias, Tensor? down_bias, str activation) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@dataclass(frozen=True)
class Facts:
    """What a meaning says.

    Attributes:
        count: number of experts.
        up: gate and up, in this order, or one role that is both.
        down: the last product.
        names: of all parts.
    """

    count: int
    up: tuple[RoleSpec, ...]
    down: RoleSpec
    names: tuple[str, ...]

    @property
    def width(self) -> int:
        """Outputs of the first products."""
        return sum(role.rows for role in self.up)


@functools.lru_cache(maxsize=4096)
def facts_of(meaning: str) -> Facts:
    """The facts of a weight in the layout ``cuda.p16_experts.DTYPE``."""
    spec, layout, shape = decode_meaning(meaning)
    assert isinstance(spec, ExpertsSpec)
    names = tuple(part.name for part in layout_of(layout).fields(spec, shape))
    up = sorted((r for r in spec.roles if r.role != "down"), key=lambda r: r.role)
    [down] = [role for role in spec.roles if role.role == "down"]
    return Facts(shape[0], tuple(up), down, names)


@functools.lru_cache(maxsize=4096)
def coding_for(role: RoleSpec) -> Coding:
    """How the matrices of a role are coded."""
    return coded(role.spec, (role.rows, role.columns))


def tile_for(arch: str, role: RoleSpec, chosen: int, rows: int) -> Config:
    """The tile for ``chosen`` experts with ``rows`` rows each, which run side by side."""
    coding = coding_for(role)
    found = choose(arch, coding, role.rows * chosen, role.columns, rows)
    # As above: long blocks, and sums of short groups, take registers that the addresses have.
    long = coding.block > 256
    if arch == "sm90" and 0 < coding.group < 128 and (found.rows == 32 or long):
        return replace(found, on_sum=False)
    crowded = long and found.rows in (16, 32) and arch not in _BY_GROUPS
    return replace(found, warps=8) if crowded else found


def height_for(arch: str, facts: Facts, total: int) -> int:
    """Rows of a block: an expert's share of the choices, as far as all products have tiles."""
    most = _HIGHEST if arch in _BY_GROUPS else _HIGHEST_BY_WARPS
    share = min(most, -(-total // facts.count))
    return min(tile_for(arch, role, 1, share).rows for role in (*facts.up, facts.down))


# **** launches ****


@dataclass(frozen=True)
class Call:
    """What all products of a call share.

    Attributes:
        arch: whose tiles are taken.
        parts: of all roles.
        routing: choices by expert.
        owners: ``[total]``, the expert of every choice.
        chosen: experts that may have rows, at most.
        asm: whether kernels may hold PTX.
    """

    arch: str
    parts: Mapping[str, torch.Tensor]
    routing: Routing
    owners: torch.Tensor
    chosen: int
    asm: bool

    def tile(self, role: RoleSpec) -> Config:
        """The tile of a role's product."""
        return tile_for(self.arch, role, self.chosen, self.routing.block)

    def product(
        self,
        x: torch.Tensor,
        top: int,
        role: RoleSpec,
        bias: torch.Tensor | None,
        y: torch.Tensor,
        config: Config,
    ) -> None:
        """One row for each choice, from ``x [total / top, K]`` into ``y [PARTS, total, N]``."""
        from qcompile.backends.cuda.jit.experts import products as kernel

        parts = {name: self.parts.get(f"{role.role}.{name}") for name in _NAMES}
        codes, scale = parts["codes"], parts["scale"]
        assert codes is not None
        assert scale is not None
        if parts["columns"] is not None:
            x, top = self.arranged(x, top, parts["columns"]), 1
        coding, shape, routing = coding_for(role), (role.rows, role.columns), self.routing
        constants = linear_constants(coding, config, shape, bias is not None, self.asm)
        del constants["N_WHOLE"]
        kernel[(-(-role.rows // config.outputs), len(routing.experts), config.parts)](
            x,
            routing.rows,
            routing.experts,
            routing.used,
            codes,
            codes if parts["high"] is None else parts["high"],
            scale,
            scale if coding.form == "symmetric" else parts[coding.form],
            scale if bias is None else bias,
            y,
            y.shape[1],
            top,
            *shape,
            groups_of(coding, role.columns),
            coding.blocks(role.columns),
            x.stride(0),
            0 if bias is None else bias.stride(0),
            y.stride(1),
            **{**constants, "HAS_BIAS": bias is not None},
            **tile_options(config),
        )

    def arranged(self, x: torch.Tensor, top: int, columns: torch.Tensor) -> torch.Tensor:
        """The row of every choice, its columns in the order of its expert (act-order)."""
        wide = x if top == 1 else x.repeat_interleave(top, dim=0)
        return wide.gather(1, columns.index_select(0, self.owners).to(torch.int64))


def prepared(
    arch: str, facts: Facts, parts: Mapping[str, torch.Tensor], ids: torch.Tensor, asm: bool
) -> Call:
    """Choices sorted for both products."""
    total = ids.numel()
    routing = by_expert(ids, facts.count, height_for(arch, facts, total))
    return Call(arch, parts, routing, ids.reshape(-1), min(total, facts.count), asm)


_NAMES = ("codes", "high", "scale", "zero", "offset", "columns")


def up_product(
    call: Call, x: torch.Tensor, facts: Facts, bias: torch.Tensor | None, top: int, chosen: str
) -> torch.Tensor:
    """What is between the products, ``[total, inner]`` in the dtype of the tokens."""
    from qcompile.backends.cuda.jit.experts import between

    function, inner = Activation.parse(chosen), facts.down.columns
    configs = [call.tile(role) for role in facts.up]
    count = max(config.parts for config in configs)
    total, start = x.shape[0] * top, 0
    sums = x.new_empty((count, total, facts.width), dtype=torch.float32)
    for role, config in zip(facts.up, configs, strict=True):
        run = slice(start, start + role.rows)
        own = None if bias is None else bias[:, run]
        call.product(x, top, role, own, sums[:, :, run], replace(config, parts=count))
        start += role.rows
    hidden = x.new_empty((total, inner))
    between[(total, -(-inner // _ADDED))](
        sums,
        hidden,
        total,
        inner,
        BN=_ADDED,
        PARTS=count,
        **function_constants(function),
        **OPTIONS,
    )
    return hidden


def function_constants(function: Activation) -> dict[str, Any]:
    """The constants of a function between the products."""
    return {
        "FUNCTION": function.function,
        "GATED": function.gated,
        "INTERLEAVED": function.interleaved,
        "ALPHA": function.alpha,
        "LIMIT": None if math.isinf(function.limit) else function.limit,
    }


def down_product(
    call: Call,
    hidden: torch.Tensor,
    role: RoleSpec,
    bias: torch.Tensor | None,
    shares: torch.Tensor,
) -> torch.Tensor:
    """The weighted sums ``[T, N]`` in the dtype of ``hidden``."""
    from qcompile.backends.cuda.jit.experts import combined

    config = call.tile(role)
    total, n = hidden.shape[0], role.rows
    y = hidden.new_empty((shares.shape[0], n))
    sums = hidden.new_empty((config.parts, total, n), dtype=torch.float32)
    call.product(hidden, 1, role, bias, sums, config)
    combined[(y.shape[0], -(-n // _ADDED))](
        sums, shares, y, total, shares.shape[1], n, BN=_ADDED, PARTS=config.parts, **OPTIONS
    )
    return y


# **** the op ****


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
    facts, arch = facts_of(meaning), arch_at(x, "triton_experts")
    total, top = ids.numel(), ids.shape[-1]
    if total == 0:
        return x.new_zeros(x.shape)
    # On a device that would wait for it: there counting the choices stops the device.
    here = x.device.type == "cpu"
    if here and not (int(ids.min()) >= 0 and int(ids.max()) < facts.count):
        raise IndexError(f"triton_experts: an expert is outside 0..{facts.count - 1}")
    named = dict(zip(facts.names, parts, strict=True))
    tokens = x if x.stride(-1) == 1 else x.contiguous()
    with torch.cuda.device_of(x):
        call = prepared(arch, facts, named, ids, probe.takes_ptx(x.device))
        hidden = up_product(call, tokens, facts, up_bias, top, activation)
        return down_product(call, hidden, facts.down, down_bias, weights.contiguous())


def _experts_shape(
    x: torch.Tensor, parts: list[torch.Tensor], meaning: str, *rest: object
) -> torch.Tensor:
    columns = facts_of(meaning).up[0].columns
    torch._check(
        x.shape[-1] == columns, lambda: f"triton_experts: x has {x.shape[-1]} columns, w {columns}"
    )
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_library.impl("triton_experts", _experts, "CompositeExplicitAutograd")
torch.library.register_fake("qcompile::triton_experts", _experts_shape, lib=_library)

triton_experts = torch.ops.qcompile.triton_experts.default
