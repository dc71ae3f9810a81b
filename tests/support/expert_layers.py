"""All experts of a layer with random matrices, what they compute, and a kernel's own call.

Comes in: specs and sizes. Goes out: weights, cases, results.
Always holds: what is expected is the definition, token by token in float64.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from qcompile import ops
from qcompile.activation import Activation
from qcompile.edge import find_route
from qcompile.experts_layout import join_roles, role_weight, stack_experts
from qcompile.kernel import Kernel
from qcompile.layout import QuantizedTensor
from qcompile.ops_experts import experts
from qcompile.passes.weights.pack import pack
from qcompile.spec import AffineSpec, ExpertsSpec, LookupSpec, Role
from qcompile.weight import WeightRef
from support.weights import random_weight, reference

_UP: tuple[Role, ...] = ("gate_up", "gate", "up")
Spec = AffineSpec | LookupSpec


def member(spec: Spec, n: int, k: int, seed: int) -> WeightRef:
    """A matrix with small values; one with an index has groups of its own."""
    plain = replace(spec, order="sequential") if isinstance(spec, AffineSpec) else spec
    weight = random_weight(plain, n, k, seed)
    parts = {**weight.parts, "scale": (weight.parts["scale"].float() / k).to(spec.scale)}
    if "offset" in parts:
        parts["offset"] = parts["offset"] / k
    if plain != spec:
        shuffled = torch.randperm(k, generator=torch.Generator().manual_seed(seed))
        parts["g_idx"] = (torch.arange(k) // spec.group)[shuffled].to(torch.int32)
    return reference(QuantizedTensor(spec, weight.layout, (n, k), parts), f"member{seed}.weight")


def layer(
    count: int, hidden: int, inner: int, up: Spec, down: Spec, roles: tuple[Role, ...]
) -> WeightRef:
    """All experts of a layer."""
    rows = {"gate": inner, "up": inner, "gate_up": 2 * inner}
    stacks = []
    for place, role in enumerate(roles):
        members = [member(up, rows[role], hidden, 10 * place + e) for e in range(count)]
        stacks.append(stack_experts(role, {role: members}, "here"))
    down_members = [member(down, hidden, inner, 100 + e) for e in range(count)]
    return join_roles("layer", [*stacks, stack_experts("down", {"down": down_members}, "here")])


def case_of(count: int, hidden: int, tokens: int, top: int, **given: Any) -> dict[str, Any]:
    """What an experts node gets beside its weight."""
    generator = torch.Generator().manual_seed(tokens)
    chosen = torch.rand(tokens, count, generator=generator).topk(top)
    return {
        "x": torch.randn(tokens, hidden, generator=generator),
        "ids": chosen.indices,
        "shares": chosen.values,
        "up_bias": None,
        "down_bias": None,
        "activation": "gated silu",
        **given,
    }


def packed_for(kernel: Kernel, weight: WeightRef) -> QuantizedTensor:
    """The weight in the kernel's layout."""
    assert kernel.layout is not None
    route = find_route(weight.layout, weight.spec, kernel.layout)
    assert route is not None
    return pack(weight, route)


def run(kernel: Kernel, packed: QuantizedTensor, case: dict[str, Any]) -> torch.Tensor:
    """The kernel's own call, as ``lower`` would emit it."""
    owner, graph = torch.nn.Module(), fx.Graph()

    def constant(name: str, value: torch.Tensor | None) -> fx.Node | None:
        if value is None:
            return None
        owner.register_buffer(name, value)
        return graph.get_attr(name)

    x = graph.placeholder("x")
    parts = [constant(n.replace(".", "_"), part) for n, part in packed.parts.items()]
    names = ("ids", "shares", "up_bias", "down_bias")
    rest = [constant(name, case[name]) for name in names]
    arguments = (x, parts, ops.encode_meaning(packed), *rest, case["activation"])
    canonical = graph.call_function(experts, arguments)
    with graph.inserting_before(canonical):
        graph.output(kernel.emit(graph, canonical, parts, packed))  # type: ignore[arg-type]
    return fx.GraphModule(owner, graph)(case["x"])  # type: ignore[no-any-return]


def expected(weight: WeightRef, case: dict[str, Any]) -> torch.Tensor:
    """The definition, float64."""
    whole, spec = weight.load(), weight.spec
    assert isinstance(spec, ExpertsSpec)
    roles = {role.role: role for role in spec.roles}
    function = Activation.parse(case["activation"])
    out = torch.zeros(case["x"].shape, dtype=torch.float64)
    for token, x in enumerate(case["x"].double()):
        for expert, share in zip(case["ids"][token], case["shares"][token], strict=True):
            e = int(expert)
            ups = [name for name in _UP if name in roles]
            matrices = [role_weight(whole, roles[name], e).dequantize().double() for name in ups]
            hidden = torch.cat(matrices) @ x
            if case["up_bias"] is not None:
                hidden = hidden + case["up_bias"][e].double()
            down = role_weight(whole, roles["down"], e).dequantize().double()
            result = down @ function(hidden)
            if case["down_bias"] is not None:
                result = result + case["down_bias"][e].double()
            out[token] += share.double() * result
    return out
