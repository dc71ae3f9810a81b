"""Every kernel for experts against float64, for everything it accepts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.expert_layers import expected, run
from support.weights import random_weight, reference

from qcompile import backends, ops
from qcompile.edge import find_route
from qcompile.experts_layout import join_roles, stack_experts
from qcompile.kernel import Accept, Kernel, Reject
from qcompile.layout import QuantizedTensor
from qcompile.ops_experts import experts
from qcompile.passes.weights.pack import pack
from qcompile.site import ExpertsSite
from qcompile.spec import AffineSpec, LookupSpec, Role, ScaledSpec
from qcompile.target import Target
from qcompile.weight import WeightRef

CPU = backends.load("cpu")
CPU.prepare()
KERNELS = [kernel for kernel in CPU.KERNELS if kernel.kind == "experts"]
HOST = CPU.default_target()
_UP: tuple[Role, ...] = ("gate_up", "gate", "up")
FOUR = AffineSpec(4, 32, "offset")
Spec = AffineSpec | LookupSpec


def member(spec: Spec, n: int, k: int, seed: int) -> WeightRef:
    """A matrix with small values; one with an index has groups of its own."""
    plain: Spec = spec
    if isinstance(spec, AffineSpec):
        plain = replace(spec, order="sequential")
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
    stacks = [
        stack_experts(
            role, {role: [member(up, rows[role], hidden, 10 * i + e) for e in range(count)]}, "here"
        )
        for i, role in enumerate(roles)
    ]
    down_members = [member(down, hidden, inner, 100 + e) for e in range(count)]
    return join_roles("layer", [*stacks, stack_experts("down", {"down": down_members}, "here")])


def packed_for(kernel: Kernel, weight: WeightRef) -> QuantizedTensor:
    if kernel.layout is None:
        return weight.load()
    route = find_route(weight.layout, weight.spec, kernel.layout)
    assert route is not None
    return pack(weight, route)


def case_of(
    count: int, hidden: int, inner: int, tokens: int, top: int, **given: Any
) -> dict[str, Any]:
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


def agrees(kernel: Kernel, weight: WeightRef, *cases: dict[str, Any]) -> None:
    packed = packed_for(kernel, weight)
    routed = replace(weight, spec=packed.spec, layout=packed.layout)
    assert isinstance(kernel.accepts(ExpertsSite("layer", routed), HOST), Accept)
    for case in cases:
        found, exact = run(kernel, packed, case), expected(weight, case)
        assert found.dtype == case["x"].dtype
        if not exact.numel():
            assert found.shape == exact.shape
            continue
        error = (found.double() - exact).norm() / exact.norm()
        allowed = kernel.tolerance.relative_l2 + torch.finfo(case["x"].dtype).eps
        assert float(error) <= allowed


def specs() -> Iterator[Spec]:
    yield from (AffineSpec(bits, 32, "symmetric", torch.float16) for bits in (2, 3, 4, 5, 6, 8))
    yield AffineSpec(4, 32, "zero")
    yield AffineSpec(4, 20, "offset")
    yield AffineSpec(4, 48, "symmetric", torch.bfloat16)
    yield AffineSpec(4, 16, "zero", order="permuted")
    yield LookupSpec(4, 32, tuple(range(-8, 8)), torch.float16)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("spec", specs(), ids=str)
def test_every_spec(kernel: Kernel, spec: Spec) -> None:
    weight = layer(5, 48, 40, spec, spec, ("gate", "up"))
    agrees(kernel, weight, *(case_of(5, 48, 40, tokens, 2) for tokens in (1, 7, 40)))


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_types_differ_by_role(kernel: Kernel) -> None:
    weight = layer(4, 64, 32, FOUR, AffineSpec(6, 16, "symmetric"), ("gate_up",))
    agrees(kernel, weight, *(case_of(4, 64, 32, tokens, 3) for tokens in (1, 9)))


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("top", [1, 4])
@pytest.mark.parametrize("tokens", [0, 1, 3, 200])
def test_routing(kernel: Kernel, tokens: int, top: int) -> None:
    weight = layer(4, 64, 32, FOUR, FOUR, ("gate", "up"))
    agrees(kernel, weight, case_of(4, 64, 32, tokens, top))


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_one_expert_has_all_tokens_and_one_has_none(kernel: Kernel) -> None:
    weight = layer(4, 64, 32, FOUR, FOUR, ("gate", "up"))
    ids = torch.tensor([[2, 0], [2, 1], [2, 0], [2, 2], [2, 1]])
    agrees(kernel, weight, case_of(4, 64, 32, 5, 2, ids=ids))
    agrees(kernel, weight, case_of(4, 64, 32, 1500, 2, ids=torch.full((1500, 2), 3)))


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize(
    "activation",
    [
        "gated silu",
        "gated gelu",
        "gated gelu_tanh",
        "gated relu",
        "gated sigmoid",
        "gated swiglu_oai alpha=1.702 limit=0.5",
        "gated silu limit=0.3",
    ],
)
def test_functions_and_biases(kernel: Kernel, activation: str) -> None:
    weight = layer(3, 48, 32, FOUR, FOUR, ("gate", "up"))
    biases = {"up_bias": torch.randn(3, 64), "down_bias": torch.randn(3, 48)}
    cases = [
        case_of(3, 48, 32, tokens, 2, activation=activation, **biases) for tokens in (1, 2, 30)
    ]
    agrees(kernel, weight, *cases)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("activation", ["silu", "relu2", "tanh", "identity", "gelu"])
def test_experts_without_a_gate(kernel: Kernel, activation: str) -> None:
    weight = layer(3, 48, 32, FOUR, FOUR, ("up",))
    agrees(kernel, weight, *(case_of(3, 48, 32, t, 2, activation=activation) for t in (1, 30)))


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_keep_routing_weights(kernel: Kernel, dtype: torch.dtype) -> None:
    """Weights such as 0.1234 are not rounded to the dtype of the tokens before they are used."""
    weight = layer(4, 64, 32, FOUR, FOUR, ("gate", "up"))
    plain = case_of(4, 64, 32, 9, 2)
    given = {"x": plain["x"].to(dtype), "shares": torch.full((9, 2), 0.1234)}
    agrees(kernel, weight, {**plain, **given})
    agrees(kernel, weight, {**plain, **given, "shares": given["shares"].to(dtype)})


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("bad", [-1, 4])
def test_an_expert_that_is_not_there(kernel: Kernel, bad: int) -> None:
    weight = layer(4, 64, 32, FOUR, FOUR, ("gate", "up"))
    case = case_of(4, 64, 32, 2, 2, ids=torch.tensor([[0, 1], [bad, 2]]))
    with pytest.raises((IndexError, RuntimeError), match=r"outside 0\.\.3"):
        run(kernel, packed_for(kernel, weight), case)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_a_refusal_says_why(kernel: Kernel) -> None:
    weight = layer(2, 32, 32, FOUR, FOUR, ("gate", "up"))
    answer = kernel.accepts(ExpertsSite("layer", weight), Target("cuda", "sm90"))
    assert isinstance(answer, Reject)
    assert "cuda:sm90" in answer.reason


def test_what_panels_do_not_hold_goes_to_the_reference() -> None:
    from qcompile.passes.select import select

    spec = ScaledSpec(torch.float8_e5m2, 32, torch.float32)
    data = {
        "data": torch.randn(32, 32).to(torch.float8_e5m2),
        "scale": torch.rand(32, 1),
    }
    one = reference(QuantizedTensor(spec, "scaled", (32, 32), data))
    roles: dict[Role, list[WeightRef]] = {"up": [one] * 2, "down": [one] * 2}
    site = ExpertsSite("layer", stack_experts("layer", roles, "here"))
    [entry] = select([site], CPU.KERNELS, HOST)
    assert entry.runs_as == "reference.experts"


def test_ops_are_well_formed() -> None:
    weight = layer(3, 48, 32, FOUR, FOUR, ("gate", "up"))
    stored, case = weight.load(), case_of(3, 48, 32, 5, 2)
    arguments = (
        case["x"],
        list(stored.parts.values()),
        ops.encode_meaning(stored),
        case["ids"],
        case["shares"],
        None,
        None,
        "gated silu",
    )
    torch.library.opcheck(experts, arguments)
    if len(KERNELS) > 1 and KERNELS[0].layout is not None:
        from qcompile.backends.cpu.experts import _shape

        packed = packed_for(KERNELS[0], weight)
        native = torch.ops.qcompile_cpu.panel_experts.default
        parts = list(packed.parts.values())
        rest = (None, None, "silu", True, 1.0, float("inf"), 0)
        torch.library.opcheck(
            native, (case["x"], case["ids"], case["shares"], parts, _shape(packed), *rest)
        )
