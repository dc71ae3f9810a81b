"""Experts by Marlin operators: routing, roles, biases, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.expert_layers import case_of, expected, layer, packed_for, run
from support.lowered import relative
from support.marlin_ops import EXPERTS, installed

from qcompile.backends.cuda import marlin_call, marlin_routed
from qcompile.backends.cuda.marlin_experts import MarlinExperts
from qcompile.backends.cuda.marlin_routed import marlin_experts, route
from qcompile.backends.cuda.routing import Routing
from qcompile.edge import find_route
from qcompile.errors import LowerError
from qcompile.kernel import Accept, Reject
from qcompile.ops import encode_meaning
from qcompile.passes.select import select
from qcompile.site import ExpertsSite
from qcompile.spec import AffineSpec, Role
from qcompile.target import Target
from qcompile.weight import WeightRef

HALF = torch.float16
KERNEL = MarlinExperts(HALF, HALF)
TARGET = Target("cuda", "sm90")
ZERO = AffineSpec(4, 32, "zero", HALF)
SYMMETRIC = AffineSpec(4, 64, "symmetric", HALF)
[VLLM] = EXPERTS
APART: tuple[Role, ...] = ("gate", "up")
JOINED: tuple[Role, ...] = ("gate_up",)


def said(weight: WeightRef, kernel: MarlinExperts = KERNEL) -> Accept | Reject:
    assert kernel.layout is not None
    found = find_route(weight.layout, weight.spec, kernel.layout)
    assert found is not None
    routed = replace(weight, spec=found.spec, layout=kernel.layout)
    return kernel.accepts(ExpertsSite("layer", routed), TARGET)


def agrees(weight: WeightRef, *cases: dict[str, Any], dtype: torch.dtype = HALF) -> None:
    kernel = MarlinExperts(dtype, dtype)
    packed = packed_for(kernel, weight)
    with installed(VLLM):
        assert isinstance(said(weight, kernel), Accept)
        for case in cases:
            case = {**case, "x": case["x"].to(dtype)}
            found, exact = run(kernel, packed, case), expected(weight, case)
            assert found.dtype == dtype
            assert found.shape == exact.shape
            if exact.numel():
                assert relative(found, exact) <= kernel.tolerance.relative_l2


@pytest.mark.parametrize("roles", [APART, JOINED])
@pytest.mark.parametrize("spec", [ZERO, SYMMETRIC, AffineSpec(8, 32, "symmetric", HALF)], ids=str)
def test_roles_and_specs(roles: tuple[Role, ...], spec: AffineSpec) -> None:
    weight = layer(5, 64, 96, spec, SYMMETRIC, roles)
    agrees(weight, *(case_of(5, 64, tokens, 2) for tokens in (0, 1, 7)))


def test_what_is_stored_is_exact() -> None:
    weight = layer(3, 64, 96, ZERO, AffineSpec(6, 32, "symmetric", HALF), APART)
    packed = packed_for(KERNEL, weight)
    assert {name: part.dtype for name, part in packed.parts.items()} == {
        "gate.weight": torch.int32,
        "gate.scale": HALF,
        "gate.zero": torch.int32,
        "up.weight": torch.int32,
        "up.scale": HALF,
        "up.zero": torch.int32,
        "down.weight": torch.int32,
        "down.scale": HALF,
    }
    assert tuple(packed.parts["down.weight"].shape) == (3, 8, 1, 256)
    route = find_route(weight.layout, weight.spec, "cuda.marlin_experts.float16")
    assert route is not None
    assert route.error is None
    other = find_route(weight.layout, weight.spec, "cuda.marlin_experts.bfloat16")
    assert other is not None
    assert other.error is not None


@pytest.mark.parametrize("top", [1, 4])
@pytest.mark.parametrize("tokens", [1, 3, 60, 300])
def test_routing(tokens: int, top: int) -> None:
    agrees(layer(4, 64, 64, ZERO, SYMMETRIC, JOINED), case_of(4, 64, tokens, top))


def test_one_expert_has_all_tokens_and_one_has_none() -> None:
    weight = layer(4, 64, 64, ZERO, ZERO, JOINED)
    ids = torch.tensor([[2, 0], [2, 1], [2, 0], [2, 3], [2, 1]])
    agrees(weight, case_of(4, 64, 5, 2, ids=ids))
    agrees(weight, case_of(4, 64, 130, 2, ids=torch.full((130, 2), 3, dtype=torch.int32)))


@pytest.mark.parametrize("tokens", [1, 9, 100])
@pytest.mark.parametrize("count", [1, 4, 60])
def test_places(tokens: int, count: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(0, count, (tokens, 3), generator=generator)
    found = route(ids, count)
    total, used = ids.numel(), int(found.used)
    assert used % found.block == len(found.rows) % found.block == 0
    assert used <= len(found.rows) == len(found.experts) * found.block
    assert found.rows[found.rows < total].sort().values.tolist() == list(range(total))
    assert bool((found.rows[used:] == total).all())
    for place, row in enumerate(found.rows[:used].tolist()):
        if row < total:
            assert int(ids.flatten()[row]) == int(found.experts[place // found.block])
    # An expert has whole blocks, and none that is empty.
    blocks = found.rows[:used].view(-1, found.block)
    assert bool((blocks < total).any(1).all())


def test_sizes_of_blocks() -> None:
    def block(tokens: int, top: int, count: int) -> int:
        return route(torch.zeros(tokens, top, dtype=torch.int64), count).block

    assert [block(t, 8, 128) for t in (1, 100, 200, 400, 600, 4096)] == [8, 8, 16, 32, 48, 64]


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16])
@pytest.mark.parametrize("activation", ["gated silu", "gated swiglu_oai alpha=1.702 limit=0.5"])
def test_functions_and_biases(dtype: torch.dtype, activation: str) -> None:
    spec = replace(ZERO, scale=dtype)
    for roles in (APART, JOINED):
        weight = layer(3, 64, 96, spec, spec, roles)
        given = {"up_bias": torch.randn(3, 192), "down_bias": torch.randn(3, 64)}
        biases = {name: bias.to(dtype) for name, bias in given.items()}
        cases = [case_of(3, 64, t, 2, activation=activation, **biases) for t in (1, 30)]
        agrees(weight, *cases, dtype=dtype)


def test_experts_without_a_gate() -> None:
    weight = layer(3, 64, 32, ZERO, ZERO, ("up",))
    agrees(weight, case_of(3, 64, 9, 2, activation="relu2"))


# **** that the operator notices what is wrong ****


def wrong(
    monkeypatch: pytest.MonkeyPatch, place: Any, name: str, value: Any, text: str | None = None
) -> None:
    """A changed call fails with a text, or gives something else."""
    weight = layer(4, 64, 64, ZERO, SYMMETRIC, JOINED)
    case = {**case_of(4, 64, 9, 2), "down_bias": torch.randn(4, 64).half()}
    case["x"] = case["x"].half()
    packed = packed_for(KERNEL, weight)
    with installed(VLLM):
        assert relative(run(KERNEL, packed, case), expected(weight, case)) < 5e-3
        monkeypatch.setattr(place, name, value)
        if text is not None:
            with pytest.raises(RuntimeError, match=text):
                run(KERNEL, packed, case)
            return
        assert not relative(run(KERNEL, packed, case), expected(weight, case)) < 0.05


def test_wrong_routing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(**more: Any) -> Any:
        def made(ids: torch.Tensor, count: int) -> Routing:
            right = route(ids, count)
            return replace(right, **{n: change(getattr(right, n)) for n, change in more.items()})

        return made

    cases = (
        ("experts", lambda t: t.roll(1), None),
        ("rows", lambda t: t.clamp(max=0), "every row once"),
        ("used", lambda t: t - 8, "every row once"),
        ("rows", lambda t: t.long(), "rows is"),
        ("block", lambda block: 24, "a block of 24"),
    )
    for name, change, text in cases:
        with monkeypatch.context() as patch:
            wrong(patch, marlin_routed, "route", changed(**{name: change}), text)


def test_wrong_arguments_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = marlin_call.arguments

    def changed(name: str, change: Any) -> Any:
        def made(operator: Any, values: dict[str, Any]) -> list[Any]:
            return real(operator, {**values, name: change(values.get(name))})

        return made

    cases = (
        ("mul_topk_weights", lambda flag: not flag, None),
        ("topk_weights", lambda shares: shares.half(), "topk_weights"),
        ("top_k", lambda top: 2, "topk_weights|index"),
        ("b_type_id", lambda kind: kind ^ 8 << 17, "type"),
        ("b_bias", lambda bias: None, None),
        ("workspace", lambda zeros: zeros[:100], "workspace of 100"),
        ("thread_k", lambda zeros: 64, "threads"),
    )
    for name, change, text in cases:
        with monkeypatch.context() as patch:
            wrong(patch, marlin_routed, "arguments", changed(name, change), text)


# **** what is refused ****


def test_refusals() -> None:
    answer = said(layer(2, 64, 64, ZERO, ZERO, APART))
    assert isinstance(answer, Reject)
    assert answer.reason == (
        "package vllm is not installed: the kernel calls "
        "_moe_C::moe_wna16_marlin_gemm (vllm 0.33.0)"
    )
    cases = (
        (ZERO, AffineSpec(8, 32, "zero", HALF), "8 bits, stored in 8, have zero points"),
        (ZERO, AffineSpec(4, 16, "zero", HALF), "the group is 16, K is 64"),
        (AffineSpec(4, 32, "zero", HALF, order="permuted"), ZERO, "gate: each expert has an order"),
    )
    with installed(VLLM):
        for up, down, text in cases:
            answer = said(layer(2, 64, 64, up, down, APART))
            assert isinstance(answer, Reject)
            assert text in answer.reason
        answer = said(layer(2, 64, 64, ZERO, AffineSpec(6, 32, "symmetric", HALF), APART))
        assert isinstance(answer, Accept)
        assert answer.note == (
            "_moe_C::moe_wna16_marlin_gemm: gate in 4 bits, up in 4 bits, down in 8 bits; "
            "rows by expert"
        )
    offset = layer(2, 64, 64, AffineSpec(4, 32, "offset"), ZERO, APART)
    [entry] = select([ExpertsSite("layer", offset)], [KERNEL], TARGET)
    assert entry.kernel is None
    assert "no edge leads from experts" in entry.verdicts[0].text


def test_a_graph_without_its_package_says_so() -> None:
    weight = layer(2, 64, 64, ZERO, ZERO, APART)
    case = case_of(2, 64, 3, 2)
    with pytest.raises(LowerError, match="package vllm is not installed"):
        run(KERNEL, packed_for(KERNEL, weight), {**case, "x": case["x"].half()})


def test_it_is_opaque_to_tracing() -> None:
    weight, case = layer(3, 64, 64, ZERO, ZERO, APART), case_of(3, 64, 5, 2)
    packed = packed_for(KERNEL, weight)
    parts, meaning = list(packed.parts.values()), encode_meaning(packed)
    rest = (parts, meaning, case["ids"], case["shares"], None, None, "gated silu")
    with installed(VLLM):
        torch.library.opcheck(marlin_experts, (case["x"].half(), *rest))
