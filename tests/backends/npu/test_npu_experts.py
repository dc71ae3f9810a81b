"""Experts on Ascend: packing, lowering, the grouped product's rules, each broken once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.lowered import relative
from support.weights import random_weight, reference
from torch import fx

from qcompile import backends, ops
from qcompile.activation import Activation
from qcompile.backends import npu
from qcompile.backends.npu import nibbles
from qcompile.backends.npu.emulation import Mode, emulating
from qcompile.backends.npu.layouts import DTYPES
from qcompile.backends.npu.planes import PLANES
from qcompile.edge import find_route
from qcompile.errors import LowerError
from qcompile.experts_layout import join_roles, role_weight, stack_experts
from qcompile.kernel import Accept, Kernel, Reject
from qcompile.layout import QuantizedTensor
from qcompile.ops_experts import experts
from qcompile.passes.select import select
from qcompile.passes.weights.pack import pack
from qcompile.passes.weights.requantize import measure
from qcompile.plans import Plan
from qcompile.site import ExpertsSite
from qcompile.spec import AffineSpec, ExpertsSpec, LookupSpec, Role
from qcompile.target import Target
from qcompile.weight import WeightRef

backends.load("npu").prepare()
NPU = torch.ops.npu
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
    up: Spec, down: Spec, roles: tuple[Role, ...] = ("gate", "up"), inner: int = INNER
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
        members = [member(up, rows[role], HIDDEN, 10 * i + e) for e in range(COUNT)]
        stacks.append(stack_experts(role, {role: members}, "here"))
    members = [member(down, HIDDEN, inner, 100 + e) for e in range(COUNT)]
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


def case(dtype: torch.dtype, tokens: int, skip: int | None = None) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(tokens)
    scores = torch.rand(tokens, COUNT, generator=generator)
    if skip is not None:
        scores[:, skip] = -1
    chosen = scores.softmax(-1).topk(2)
    return {
        "x": torch.randn(tokens, HIDDEN, generator=generator).to(dtype),
        "ids": chosen.indices,
        "shares": chosen.values,
        "up_bias": torch.randn(COUNT, 2 * INNER, generator=generator).to(dtype),
        "down_bias": torch.randn(COUNT, HIDDEN, generator=generator).to(dtype),
    }


def run(
    dtype: torch.dtype,
    packed: QuantizedTensor,
    given: dict[str, Any],
    wide: bool,
    text: str = GATED,
) -> Any:
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
    with emulating(Mode("910b", wide)):
        return fx.GraphModule(owner, graph)(given["x"])


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


FOUR = AffineSpec(4, 32, "zero", HALF)
ACCEPTED: dict[str, tuple[Spec, Spec]] = {
    "symmetric": (AffineSpec(4, 32, "symmetric", HALF), AffineSpec(4, 32, "symmetric", HALF)),
    "zero": (FOUR, FOUR),
    "offset": (AffineSpec(4, 32, "offset"), AffineSpec(4, 32, "offset")),
    "groups of 16": (AffineSpec(3, 16, "symmetric"), AffineSpec(2, 16, "offset")),
    "by channels": (AffineSpec(4, 4096, "zero", HALF), AffineSpec(8, 4096, "symmetric")),
    "eight bits by groups": (AffineSpec(8, 32, "symmetric"), AffineSpec(8, 16, "zero", HALF)),
    "five and six bits": (AffineSpec(5, 32, "offset"), AffineSpec(6, 16, "symmetric")),
    "act-order": (
        AffineSpec(4, 32, "zero", HALF, order="permuted"),
        AffineSpec(4, 32, "symmetric", HALF, order="permuted"),
    ),
    "act-order of eight bits": (FOUR, AffineSpec(8, 32, "zero", HALF, order="permuted")),
    "tables": (
        LookupSpec(4, 32, (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)),
        LookupSpec(
            4, 16, (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 127)
        ),
    ),
    "tables by channels": (LookupSpec(4, 4096, tuple(range(-8, 8)), HALF), FOUR),
}
FUNCTIONS = (
    "gated gelu",
    "gated gelu_tanh",
    "gated relu",
    "gated sigmoid",
    "gated silu limit=0.3",
    "gated swiglu_oai alpha=1.702 limit=0.5",
    "silu",
    "gelu",
    "relu2",
    "tanh",
    "identity",
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("roles", [("gate", "up"), ("gate_up",)], ids=str)
@pytest.mark.parametrize("name", ACCEPTED)
def test_layers_agree_with_the_formula(
    name: str, roles: tuple[Role, ...], dtype: torch.dtype
) -> None:
    weight = layer(*ACCEPTED[name], roles)
    assert isinstance(answer(dtype, weight), Accept)
    packed = packed_for(dtype, weight)
    for tokens, skip in ((1, None), (9, 2), (40, None)):
        given = case(dtype, tokens, skip)
        if tokens == 9:
            given.update(up_bias=None, down_bias=None)
        expected = documented(weight, given)
        found = run(dtype, packed, given, wide=False)
        assert found.dtype == dtype
        assert relative(found, expected) <= kernel(dtype).tolerance.relative_l2
        wide = {
            n: v.float() if n in ("x", "up_bias", "down_bias") and v is not None else v
            for n, v in given.items()
        }
        lost = measure(weight, packed)
        assert relative(run(dtype, packed, wide, wide=True), expected) < 3 * lost + 1e-6


def test_symmetric_weights_get_offsets_of_zero() -> None:
    packed = packed_for(HALF, layer(*ACCEPTED["symmetric"]))
    offsets = [part for name, part in packed.parts.items() if name.endswith(".offset")]
    assert len(offsets) == 3
    assert not any(part.any() for part in offsets)


def test_no_tokens() -> None:
    given = case(HALF, 0)
    packed = packed_for(HALF, layer(FOUR, FOUR))
    owner, graph = torch.nn.Module(), fx.Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = given["x"]
    node = graph.call_function(experts, (x, [], "", x, x, None, None, GATED))
    with graph.inserting_before(node):
        graph.output(kernel(HALF).emit(graph, node, [], packed))
    assert fx.GraphModule(owner, graph)(given["x"]).shape == (0, HIDDEN)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("text", FUNCTIONS)
def test_every_function_between_the_products(text: str, dtype: torch.dtype) -> None:
    gated = "gated" in text
    for roles in [("gate", "up"), ("gate_up",)] if gated else [("up",)]:
        weight = layer(FOUR, FOUR, roles)  # type: ignore[arg-type]
        assert isinstance(answer(dtype, weight, text), Accept)
        packed, given = packed_for(dtype, weight), case(dtype, 9)
        if not gated:
            given["up_bias"] = given["up_bias"][:, :INNER].contiguous()
        expected = documented(weight, given, text)
        found = run(dtype, packed, given, wide=False, text=text)
        assert found.dtype == dtype
        assert relative(found, expected) <= kernel(dtype).tolerance.relative_l2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_halves_hold_every_value(dtype: torch.dtype) -> None:
    """Eight bits by groups lose what scales lose, and no more; both ends of the codes occur."""
    spec = AffineSpec(8, 32, "zero", dtype)
    weight = random_weight(spec, 8, 64)
    weight.parts["codes"][0, :2] = torch.tensor([0, 255], dtype=torch.uint8)
    weight.parts["zero"][0] = torch.tensor([0, 256])
    name = next(p for p in PLANES.values() if p.dtype == dtype).name
    route = find_route("affine", spec, name)
    assert route is not None
    assert route.error is None
    packed = route.apply(weight)
    packed.check(name)
    assert torch.equal(packed.dequantize(), weight.dequantize())


@pytest.mark.parametrize(
    ("up", "down", "says"),
    [
        (AffineSpec(4, 48, "zero"), FOUR, r"groups of 48 do not divide 64"),
        (FOUR, AffineSpec(8, 40, "zero"), r"down: .*groups of 40 do not divide 96"),
    ],
)
def test_what_is_refused(up: Spec, down: Spec, says: str) -> None:
    found = answer(HALF, layer(up, down))
    assert isinstance(found, Reject)
    assert re.search(says, found.reason), found.reason


def test_other_devices_are_refused() -> None:
    weight = layer(FOUR, FOUR)
    [entry] = select([ExpertsSite("e", weight)], npu.kernels(HALF), Target("npu", "310p"))
    assert "packed weights need an A2 or A3; the target is 310p" in entry.verdicts[0].text
    [entry] = select([ExpertsSite("e", weight)], npu.kernels(torch.float32), TARGET)
    assert "x is float32" in entry.verdicts[0].text


def test_only_the_role_that_needs_it_is_rounded() -> None:
    weight = layer(FOUR, AffineSpec(6, 40, "symmetric"))
    site = ExpertsSite("e", weight)
    [entry] = select([site], npu.kernels(HALF), TARGET)
    assert entry.kernel is None
    [entry] = select([site], npu.kernels(HALF), TARGET, "requantize", HALF)
    assert entry.requantized
    assert entry.route is not None
    assert "down requantized to 8 bits by channels" in str(entry.route.error)
    spec = entry.route.spec
    assert isinstance(spec, ExpertsSpec)
    kinds = {role.role: str(role.spec) for role in spec.roles}
    assert kinds == {"gate": "uint4 g32 zero", "up": "uint4 g32 zero", "down": "uint8 g96 zero"}
    packed = pack(weight, entry.route)
    error = measure(weight, packed)
    assert 1e-3 < error < 1e-2
    plan = Plan(TARGET, "gguf", "x.gguf", (entry,)).measured("layer", error)
    assert f"relative L2 error {error:.1e}" in plan.explain("e")
    given = case(HALF, 9)
    found = run(HALF, packed, given, wide=False)
    assert relative(found, documented(weight, given)) < 3 * error


# **** rules ****


@pytest.fixture
def emulated() -> Iterator[None]:
    with emulating(Mode("910b")):
        yield


def call(**given: Any) -> dict[str, Any]:
    values = torch.randint(-8, 8, (COUNT, HIDDEN, INNER)).to(torch.int8)
    return {
        "x": [torch.randn(11, HIDDEN).half()],
        "weight": [nibbles.pack(values)],
        "antiquant_scale": [torch.rand(COUNT, 2, INNER).half()],
        "antiquant_offset": [torch.zeros(COUNT, 2, INNER).half()],
        "group_list": torch.tensor([3, 0, 5, 3]),
        "split_item": 2,
        "group_type": 0,
        "group_list_type": 1,
        **given,
    }


WRONG: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "no offset": (lambda a: {"antiquant_offset": None}, "antiquant_offset is missing"),
    "no scale": (lambda a: {"antiquant_scale": None}, "antiquant_scale is missing"),
    "shape of the offset": (
        lambda a: {"antiquant_offset": [a["antiquant_offset"][0][:, :1]]},
        "one shape",
    ),
    "dtype of the scale": (
        lambda a: {"antiquant_scale": [a["antiquant_scale"][0].float()]},
        "x is float32|dtype of x",
    ),
    "groups that do not divide K": (
        lambda a: {
            n: [torch.ones(COUNT, 3, INNER).half()] for n in ("antiquant_scale", "antiquant_offset")
        },
        "G divides K",
    ),
    "groups of int8": (lambda a: {"weight": [nibbles.unpack(a["weight"][0])]}, "int8 weight"),
    "transposed int4": (
        lambda a: {"weight": [a["weight"][0].transpose(1, 2).contiguous().transpose(1, 2)]},
        "contiguous",
    ),
    "no group_type": (lambda a: {"group_type": None}, "group_type is None"),
    "split_item": (lambda a: {"split_item": 0}, "split_item 0"),
    "rows that are not there": (
        lambda a: {"group_list": torch.tensor([3, 0, 5, 4])},
        "names 12 rows of 11",
    ),
    "running sums taken for counts": (
        lambda a: {"group_list": torch.tensor([3, 3, 8, 11])},
        "names 25 rows of 11",
    ),
    "int32 counts": (lambda a: {"group_list": a["group_list"].int()}, "group_list must be int64"),
    "bias": (lambda a: {"bias": [torch.zeros(COUNT, INNER)]}, "bias is float32"),
    "three dimensions": (lambda a: {"x": [a["x"][0][None]]}, "x must be"),
    "an activation": (lambda a: {"act_type": 1}, "act_type is not emulated"),
}


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_grouped_product_is_refused_with_its_rule(name: str) -> None:
    change, says = WRONG[name]
    right = call()
    NPU.npu_grouped_matmul(**right)
    with pytest.raises(LowerError, match=says):
        NPU.npu_grouped_matmul(**{**right, **change(right)})


@pytest.mark.usefixtures("emulated")
def test_the_wrong_mode_of_finalize_is_caught() -> None:
    x, ids = torch.randn(6, 16).half(), torch.randint(0, COUNT, (6, 2), dtype=torch.int32)
    shares = torch.rand(6, 2).half()
    routing = {
        "active_num": 12,
        "expert_num": COUNT,
        "expert_tokens_num_type": 1,
        "expert_tokens_num_flag": True,
        "active_expert_range": [0, COUNT],
        "quant_mode": -1,
    }
    rows, places, counts, _ = NPU.npu_moe_init_routing_v2(x, ids, **routing)
    assert torch.equal(counts, torch.bincount(ids.flatten().long(), minlength=COUNT))
    found = NPU.npu_moe_finalize_routing(
        rows, None, None, None, shares, places, ids, drop_pad_mode=2
    )
    exact = x.double() * shares.double().sum(1, keepdim=True)
    assert relative(found, exact) < 1e-3
    with pytest.raises(LowerError, match="need drop_pad_mode 2; drop_pad_mode is 0"):
        NPU.npu_moe_finalize_routing(rows, None, None, None, shares, places, ids)
    # Where the indices come from elsewhere, the wrong mode shows in the result.
    wrong = NPU.npu_moe_finalize_routing(rows, None, None, None, shares, places.clone(), ids)
    assert relative(wrong, exact) > 0.1
    with pytest.raises(LowerError, match="scales are float32"):
        NPU.npu_moe_finalize_routing(
            rows, None, None, None, shares.float(), places, ids, drop_pad_mode=2
        )
    with pytest.raises(LowerError, match="active_num is 6"):
        NPU.npu_moe_init_routing_v2(x, ids, **{**routing, "active_num": 6})
    with pytest.raises(LowerError, match="must be int32"):
        NPU.npu_moe_init_routing_v2(x, ids.long(), **routing)


@pytest.mark.usefixtures("emulated")
def test_shapes_for_tracing_are_those_of_results() -> None:
    x, ids = torch.randn(6, 16).half(), torch.randint(0, COUNT, (6, 2), dtype=torch.int32)
    routing: dict[str, Any] = {"active_num": 12, "expert_num": COUNT, "expert_tokens_num_type": 1}
    routing |= {"expert_tokens_num_flag": True, "active_expert_range": [0, COUNT]}
    torch.library.opcheck(NPU.npu_moe_init_routing_v2.default, (x, ids), routing)
    rows, places, _, _ = NPU.npu_moe_init_routing_v2(x, ids, **routing)
    given = (rows, None, None, None, torch.rand(6, 2).half(), places, ids)
    torch.library.opcheck(NPU.npu_moe_finalize_routing.default, given, {"drop_pad_mode": 2})
    torch.library.opcheck(NPU.npu_swiglu.default, (x,))
    right = call()
    first, second = right.pop("x"), right.pop("weight")
    torch.library.opcheck(NPU.npu_grouped_matmul.default, (first, second), right)
