"""A layer of experts for an Ascend device: packed, lowered, and computed from its definition.

Comes in: specs of the matrices. Goes out: the weight, the kernel's graph, the expected result.
Always holds: what is expected is computed token by token in float64.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from qcompile import ops
from qcompile.activation import Activation
from qcompile.backends import npu
from qcompile.backends.npu.emulation import Mode, emulating
from qcompile.edge import find_route
from qcompile.experts_layout import join_roles, role_weight, stack_experts
from qcompile.kernel import Accept, Kernel, Reject
from qcompile.layout import QuantizedTensor
from qcompile.ops_experts import experts
from qcompile.passes.weights.pack import pack
from qcompile.site import ExpertsSite
from qcompile.spec import AffineSpec, ExpertsSpec, LookupSpec, Role
from qcompile.target import Target
from qcompile.weight import WeightRef
from support.weights import random_weight, reference

TARGET = Target("npu", "910b")
GATED = str(Activation("silu"))
Spec = AffineSpec | LookupSpec
HALF = torch.float16
COUNT, HIDDEN, INNER = 4, 64, 96
UP: tuple[Role, ...] = ("gate", "up")
ROLES: tuple[Role, ...] = ("gate_up", "gate", "up")


def kernel(dtype: torch.dtype) -> Kernel:
    return next(k for k in npu.kernels(dtype) if k.kind == "experts")


def layer(
    up: Spec,
    down: Spec,
    roles: tuple[Role, ...] = ("gate", "up"),
    inner: int = INNER,
    hidden: int = HIDDEN,
) -> WeightRef:
    """All experts of a layer, with values small enough for products of them."""

    def member(spec: Spec, n: int, k: int, seed: int) -> WeightRef:
        permuted = isinstance(spec, AffineSpec) and spec.order == "permuted"
        plain = replace(spec, order="sequential") if isinstance(spec, AffineSpec) else spec
        weight = random_weight(plain, n, k, seed)
        parts = {**weight.parts, "scale": (weight.parts["scale"].float() / k).to(spec.scale)}
        if "offset" in parts:
            parts["offset"] = parts["offset"] / k
        if permuted:
            shuffled = torch.randperm(k, generator=torch.Generator().manual_seed(seed))
            parts["g_idx"] = (shuffled // spec.group).to(torch.int32)
        made = QuantizedTensor(spec, weight.layout, (n, k), parts)
        return reference(made, f"member{seed}.weight")

    rows = {"gate": inner, "up": inner, "gate_up": 2 * inner}
    stacks = []
    for i, role in enumerate(roles):
        members = [member(up, rows[role], hidden, 10 * i + e) for e in range(COUNT)]
        stacks.append(stack_experts(role, {role: members}, "here"))
    members = [member(down, hidden, inner, 100 + e) for e in range(COUNT)]
    return join_roles("layer", [*stacks, stack_experts("down", {"down": members}, "here")])


def packed_for(dtype: torch.dtype, weight: WeightRef) -> QuantizedTensor:
    layout = kernel(dtype).layout
    assert layout is not None
    route = find_route(weight.layout, weight.spec, layout)
    assert route is not None
    return pack(weight, route)


def answer(dtype: torch.dtype, weight: WeightRef, text: str = GATED) -> Accept | Reject:
    made = kernel(dtype)
    assert made.layout is not None
    route = find_route(weight.layout, weight.spec, made.layout)
    assert route is not None
    routed = replace(weight, spec=route.spec, layout=made.layout)
    return made.accepts(ExpertsSite("experts", routed, True, text), TARGET)


def case(
    dtype: torch.dtype,
    tokens: int,
    skip: int | None = None,
    inner: int = INNER,
    hidden: int = HIDDEN,
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(tokens)
    scores = torch.rand(tokens, COUNT, generator=generator)
    if skip is not None:
        scores[:, skip] = -1
    chosen = scores.softmax(-1).topk(2)
    return {
        "x": torch.randn(tokens, hidden, generator=generator).to(dtype),
        "ids": chosen.indices,
        "shares": chosen.values,
        "up_bias": torch.randn(COUNT, 2 * inner, generator=generator).to(dtype),
        "down_bias": torch.randn(COUNT, hidden, generator=generator).to(dtype),
    }


def lowered(
    dtype: torch.dtype, packed: QuantizedTensor, given: dict[str, Any], text: str = GATED
) -> fx.GraphModule:
    """The kernel's own calls, as ``lower`` would put them into a graph."""
    owner, graph = torch.nn.Module(), fx.Graph()
    x = graph.placeholder("x")

    def constant(name: str, value: torch.Tensor | None) -> fx.Node | None:
        if value is None:
            return None
        owner.register_buffer(name, value)
        return graph.get_attr(name)

    parts: list[Any] = [constant(n.replace(".", "_"), part) for n, part in packed.parts.items()]
    rest = [constant(n, given[n]) for n in ("ids", "shares", "up_bias", "down_bias")]
    arguments = (x, parts, ops.encode_meaning(packed), *rest, text)
    node = graph.call_function(experts, arguments)
    with graph.inserting_before(node):
        graph.output(kernel(dtype).emit(graph, node, parts, packed))
    return fx.GraphModule(owner, graph)


def run(
    dtype: torch.dtype,
    packed: QuantizedTensor,
    given: dict[str, Any],
    wide: bool,
    text: str = GATED,
) -> Any:
    """What the calls make under emulation."""
    graph = lowered(dtype, packed, given, text)
    with emulating(Mode("910b", wide)):
        return graph(given["x"])


def documented(weight: WeightRef, given: dict[str, Any], text: str = GATED) -> torch.Tensor:
    """Token by token, choice by choice, in float64."""
    loaded, function = weight.load(), Activation.parse(text)
    assert isinstance(weight.spec, ExpertsSpec)
    matrices = {
        (role.role, e): role_weight(loaded, role, e).dequantize().double()
        for role in weight.spec.roles
        for e in range(COUNT)
    }
    out = torch.zeros(given["x"].shape, dtype=torch.float64)
    for token, (ids, shares) in enumerate(zip(given["ids"], given["shares"], strict=True)):
        x = given["x"][token].double()
        for expert, share in zip(ids.tolist(), shares.double(), strict=True):
            names = [name for name in ROLES if (name, 0) in matrices]
            both = torch.cat([matrices[name, expert] @ x for name in names])
            if given["up_bias"] is not None:
                both = both + given["up_bias"][expert].double()
            y = matrices["down", expert] @ function(both)
            if given["down_bias"] is not None:
                y = y + given["down_bias"][expert].double()
            out[token] += share * y
    return out
