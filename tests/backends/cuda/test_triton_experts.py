"""What the experts kernel says to sites, what its layout keeps, what its operator needs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.expert_layers import case_of, layer, packed_for, run

from qcompile.backends import cuda, load
from qcompile.backends.cuda.layouts import DTYPES
from qcompile.backends.cuda.routing import by_expert
from qcompile.backends.cuda.triton_experts import TritonExperts
from qcompile.backends.cuda.triton_routed import triton_experts
from qcompile.edge import find_route
from qcompile.errors import LowerError
from qcompile.experts_layout import role_weight
from qcompile.kernel import Accept, Reject
from qcompile.ops import encode_meaning
from qcompile.passes.select import select
from qcompile.site import ExpertsSite
from qcompile.spec import AffineSpec, ExpertsSpec, LookupSpec, Role
from qcompile.target import Target
from qcompile.weight import WeightRef

load("cuda").prepare()
HALF = torch.float16
SM90 = Target("cuda", "sm90")
FOUR = AffineSpec(4, 32, "zero", HALF)
SIX = AffineSpec(6, 16, "symmetric", HALF)
APART: tuple[Role, ...] = ("gate", "up")


def answer(
    weight: WeightRef, target: Target = SM90, activations: torch.dtype = HALF
) -> Accept | Reject:
    one = TritonExperts(HALF, activations)
    assert one.layout is not None
    route = find_route(weight.layout, weight.spec, one.layout)
    assert route is not None
    routed = replace(weight, spec=route.spec, layout=one.layout)
    return one.accepts(ExpertsSite("layer", routed), target)


def test_what_is_refused_and_why() -> None:
    weight = layer(2, 64, 32, FOUR, SIX, APART)
    eights = layer(2, 64, 32, FOUR, replace(SIX, group=8), APART)
    cases: tuple[tuple[Reject | Accept, str], ...] = (
        (answer(eights), "down: groups of 8 columns; a matrix unit takes 16"),
        (answer(weight, Target("cpu")), "runs on a CUDA device; the target is cpu"),
        (answer(weight, Target("cuda", "sm75")), "needs sm80 or newer; the target is sm75"),
        (answer(weight, SM90, torch.float32), "activations in torch.float32"),
    )
    for found, said in cases:
        assert isinstance(found, Reject)
        assert said in found.reason


def test_what_is_accepted() -> None:
    found = answer(layer(2, 64, 32, FOUR, SIX, APART))
    assert isinstance(found, Accept)
    assert found.note == "gate 4 bits, up 4 bits, down 6 bits; rows by expert"
    permuted = replace(FOUR, order="permuted")
    found = answer(layer(2, 64, 32, permuted, SIX, ("gate_up",)))
    assert isinstance(found, Accept)
    assert "gate_up 4 bits (act-order: rows gathered)" in found.note


def test_it_is_the_choice_where_no_package_is_installed() -> None:
    site = ExpertsSite("layer", layer(2, 64, 32, FOUR, FOUR, APART))
    [entry] = select([site], cuda.KERNELS, SM90)
    assert entry.kernel is not None
    assert entry.kernel.name == "cuda.triton_experts"
    assert [verdict.kernel for verdict in entry.verdicts] == [
        "cuda.marlin_experts",
        "cuda.triton_experts",
    ]
    assert "package vllm is not installed" in entry.verdicts[0].text


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "spec",
    [
        AffineSpec(3, 32, "zero"),
        AffineSpec(4, 32, "offset"),
        AffineSpec(4, 16, "zero", order="permuted"),
        LookupSpec(4, 32, tuple(range(-8, 8))),
    ],
    ids=str,
)
def test_the_layout_keeps_every_expert(spec: Any, dtype: torch.dtype) -> None:
    """Bit for bit, apart from what the edge says that it rounds."""
    weight = layer(3, 80, 48, spec, replace(spec, scale=dtype), APART)
    one = TritonExperts(dtype, dtype)
    packed, plain = packed_for(one, weight), weight.load()
    packed.check("here")
    route = find_route(weight.layout, weight.spec, str(one.layout))
    assert route is not None
    assert route.error is not None
    assert "rounded to" in route.error
    assert isinstance(packed.spec, ExpertsSpec)
    assert isinstance(weight.spec, ExpertsSpec)
    for before, after in zip(weight.spec.roles, packed.spec.roles, strict=True):
        for expert in range(3):
            given = role_weight(plain, before, expert)
            parts = dict(given.parts)
            for name in ("scale", "offset"):
                if name in parts:
                    parts[name] = parts[name].to(dtype).to(parts[name].dtype)
            exact = replace(given, parts=parts).dequantize()
            assert torch.equal(role_weight(packed, after, expert).dequantize(), exact)
    exactly = layer(3, 64, 32, FOUR, SIX, APART)
    route = find_route(exactly.layout, exactly.spec, "cuda.p16_experts.float16")
    assert route is not None
    assert route.error is None


def test_the_operator_without_a_device_says_so() -> None:
    one = TritonExperts(HALF, HALF)
    packed = packed_for(one, layer(2, 64, 32, FOUR, SIX, APART))
    case = {**case_of(2, 64, 3, 2), "x": torch.randn(3, 64).half()}
    with pytest.raises(LowerError, match="no CUDA device runs this graph"):
        run(one, packed, case)
    meta = [part.to("meta") for part in packed.parts.values()]
    rest = (case["ids"].to("meta"), case["shares"].to("meta"), None, None, "gated silu")
    x = torch.zeros(5, 64, device="meta").half()
    assert triton_experts(x, meta, encode_meaning(packed), *rest).shape == (5, 64)
    with pytest.raises(RuntimeError, match="x has 63 columns, w 64"):
        triton_experts(x[:, 1:], meta, encode_meaning(packed), *rest)


@pytest.mark.parametrize("block", [8, 128])
@pytest.mark.parametrize(("tokens", "top"), [(1, 1), (1, 8), (40, 3), (300, 2)])
def test_choices_keep_their_order_within_an_expert(tokens: int, top: int, block: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, 8, generator=generator).topk(top).indices
    found = by_expert(ids, 8, block)
    used, flat = int(found.used), ids.flatten()
    for expert in range(8):
        places = (found.experts == expert).repeat_interleave(block)[: len(found.rows)]
        rows = found.rows[:used][places[:used]]
        real = rows[rows < len(flat)].long()
        assert torch.equal(real, (flat == expert).nonzero().flatten())
        assert len(rows) == -(-len(real) // block) * block
    assert bool((found.rows[used:] == len(flat)).all())
