"""``triton_experts`` in the interpreter: against float64, within its own memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.expert_layers import case_of, expected, layer, packed_for, run
from support.interpreted import InterpreterError, is_interpreted, strict, surrounded
from support.lowered import relative

from qcompile.activation import Activation
from qcompile.backends import cuda, load
from qcompile.backends.cuda import triton_routed
from qcompile.backends.cuda.coding import E2M1_TWICE
from qcompile.backends.cuda.jit.experts import between, combined, products
from qcompile.backends.cuda.launch import OPTIONS
from qcompile.backends.cuda.layouts import DTYPES
from qcompile.backends.cuda.triton_routed import function_constants
from qcompile.kernel import Kernel
from qcompile.ops import encode_meaning
from qcompile.spec import AffineSpec, LookupSpec, Role
from qcompile.weight import WeightRef

load("cuda").prepare()
KERNELS = (products, between, combined)
HALF = torch.float16
# Weights of three products and what is between them are rounded, or nothing is.
LIMIT = {HALF: 2e-3, torch.bfloat16: 1.5e-2, torch.float32: 2e-6}
APART: tuple[Role, ...] = ("gate", "up")
JOINED: tuple[Role, ...] = ("gate_up",)
FOUR = AffineSpec(4, 32, "offset", HALF)
GATED = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "tanh", "identity", "swiglu_oai")
OAI = "gated interleaved swiglu_oai alpha=1.702 limit=0.5"
MORE = ("", " limit=0.5", " alpha=1.702 limit=0.25")


def kernel(dtype: torch.dtype) -> Kernel:
    return next(k for k in cuda.kernels(dtype) if k.name == "cuda.triton_experts")


def agrees(weight: WeightRef, case: dict[str, Any], dtype: torch.dtype = HALF) -> None:
    """In the dtype of the weights' scales, and without rounding."""
    packed = packed_for(kernel(dtype), weight)
    packed.check("here")
    plain = replace(weight, spec=packed.spec, layout=packed.layout, read=packed.take_rows)
    for x in (case["x"].to(dtype), case["x"].to(dtype).float()):
        given = {**case, "x": surrounded(x)}
        with strict(*KERNELS):
            found = run(kernel(dtype), packed, given)
        assert found.dtype == x.dtype
        assert found.shape == x.shape
        assert relative(found, expected(plain, given)) < LIMIT[x.dtype]


def test_kernels_are_interpreted() -> None:
    assert all(is_interpreted(one) for one in KERNELS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("up", "down", "roles"),
    [
        (AffineSpec(4, 32, "offset"), AffineSpec(6, 16, "symmetric"), APART),
        (AffineSpec(4, 16, "zero", order="permuted"), AffineSpec(3, 32, "zero"), APART),
        (AffineSpec(8, 4096, "symmetric"), AffineSpec(4, 16, "zero", order="permuted"), JOINED),
        (LookupSpec(4, 32, E2M1_TWICE), AffineSpec(2, 16, "offset"), JOINED),
    ],
    ids=str,
)
def test_specs(up: Any, down: Any, roles: tuple[Role, ...], dtype: torch.dtype) -> None:
    weight = layer(3, 80, 48, up, down, roles)
    agrees(weight, case_of(3, 80, 5, 2), dtype)


@pytest.mark.parametrize("tokens", [1, 9, 70])
@pytest.mark.parametrize("top", [1, 4])
def test_routing(tokens: int, top: int) -> None:
    weight = layer(4, 64, 32, FOUR, FOUR, APART)
    agrees(weight, case_of(4, 64, tokens, top))


def test_one_expert_has_all_tokens_and_some_have_none() -> None:
    weight = layer(4, 64, 32, FOUR, FOUR, JOINED)
    ids = torch.tensor([[2, 0], [2, 1], [2, 0], [2, 2], [2, 1]])
    agrees(weight, case_of(4, 64, 5, 2, ids=ids))
    agrees(weight, case_of(4, 64, 40, 2, ids=torch.full((40, 2), 3)))


@pytest.mark.parametrize("name", GATED)
def test_functions(name: str) -> None:
    """Also of values whose exponentials are beyond float32."""
    torch.manual_seed(0)
    sums = torch.randn(2, 5, 70) * torch.tensor([1.0, 10.0, 200.0]).repeat(24)[:70]
    forms = [f"gated{turns} {name}{more}" for turns in ("", " interleaved") for more in MORE]
    for text in (*forms, *([name] if name != "swiglu_oai" else [])):
        function = Activation.parse(text)
        width = 35 if function.gated else 70
        hidden = torch.full((5, width), float("nan"))
        with strict(between), np.errstate(over="ignore"):
            between[(5, 3)](
                sums, hidden, 5, width, BN=32, PARTS=2, **function_constants(function), **OPTIONS
            )
        given = sums.double().sum(0)
        # What a function rounds is multiplied by what stands beside the gate.
        tiny = 5e-7 * float(given.abs().max()) if function.gated else 1e-6
        assert torch.allclose(hidden.double(), function(given), 1e-6, tiny), text


def test_biases() -> None:
    torch.manual_seed(0)
    biases = {"up_bias": torch.randn(3, 64), "down_bias": torch.randn(3, 48)}
    for roles, text in ((APART, "gated gelu"), (JOINED, OAI)):
        weight = layer(3, 48, 32, FOUR, FOUR, roles)
        agrees(weight, case_of(3, 48, 3, 2, activation=text, **biases))
    single = layer(3, 48, 32, FOUR, FOUR, ("up",))
    agrees(single, case_of(3, 48, 3, 2, activation="relu2", up_bias=torch.randn(3, 32)))


def test_parts_of_a_long_row_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Biases are added once, whatever K is split into."""
    spec = AffineSpec(4, 32, "zero", HALF)
    weight = layer(2, 1040, 16, spec, spec, JOINED)
    case = case_of(2, 1040, 2, 2, up_bias=torch.randn(2, 32), down_bias=torch.randn(2, 1040))
    tile = triton_routed.tile_for
    for parts in (1, 3):
        monkeypatch.setattr(
            triton_routed, "tile_for", lambda *given, p=parts: replace(tile(*given), parts=p)
        )
        agrees(weight, case)


def test_no_tokens_and_wrong_experts() -> None:
    weight = layer(4, 64, 32, FOUR, FOUR, APART)
    packed = packed_for(kernel(HALF), weight)
    case = {**case_of(4, 64, 2, 2), "x": torch.randn(2, 64).half()}
    none = {**case, **{n: case[n][:0] for n in ("x", "ids", "shares")}}
    assert run(kernel(HALF), packed, none).shape == (0, 64)
    for bad in (-1, 4):
        wrong = {**case, "ids": torch.tensor([[0, 1], [bad, 2]])}
        with pytest.raises(IndexError, match=r"outside 0\.\.3"):
            run(kernel(HALF), packed, wrong)


def test_shares_keep_their_dtype() -> None:
    weight = layer(4, 64, 32, FOUR, FOUR, APART)
    shares = torch.full((9, 2), 0.1234)
    for given in (shares, shares.half(), shares.t().contiguous().t()):
        agrees(weight, case_of(4, 64, 9, 2, shares=given))


def test_an_access_outside_is_seen() -> None:
    """What the other tests rely on."""
    weight = layer(4, 64, 32, FOUR, FOUR, APART)
    packed = packed_for(kernel(HALF), weight)
    fewer = {**packed.parts, "up.codes": packed.parts["up.codes"][:2].clone()}
    case = {**case_of(4, 64, 4, 4), "x": torch.randn(4, 64).half()}
    with strict(*KERNELS), pytest.raises(InterpreterError, match="OutOfBounds"):
        run(kernel(HALF), replace(packed, parts=fewer), case)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_operator_is_what_compilers_expect(dtype: torch.dtype) -> None:
    packed = packed_for(kernel(dtype), layer(3, 48, 32, FOUR, FOUR, APART))
    case = case_of(3, 48, 4, 2)
    x, parts, meaning = case["x"].to(dtype), list(packed.parts.values()), encode_meaning(packed)
    rest = (case["ids"], case["shares"], None, None, "gated silu")
    torch.library.opcheck(triton_routed.triton_experts, (x, parts, meaning, *rest))

    def call(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = triton_routed.triton_experts(torch.relu(x), parts, meaning, *rest)
        return y * 2

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), call(x))
    assert torch.equal(call(x), call(x))
