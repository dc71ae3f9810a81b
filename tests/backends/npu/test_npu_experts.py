"""Experts on Ascend: packing, lowering, refusals."""

from __future__ import annotations

import re

import pytest
import torch
from support.lowered import relative
from support.npu_experts import (
    GATED,
    HALF,
    HIDDEN,
    INNER,
    TARGET,
    Spec,
    answer,
    case,
    documented,
    kernel,
    layer,
    packed_for,
    run,
)
from support.weights import random_weight
from torch import fx

from qcompile import backends
from qcompile.backends import npu
from qcompile.backends.npu.layouts import DTYPES
from qcompile.backends.npu.planes import PLANES
from qcompile.edge import find_route
from qcompile.kernel import Accept, Reject
from qcompile.ops_experts import experts
from qcompile.passes.select import select
from qcompile.passes.weights.pack import pack
from qcompile.passes.weights.requantize import measure
from qcompile.plans import Plan
from qcompile.site import ExpertsSite
from qcompile.spec import AffineSpec, ExpertsSpec, LookupSpec, Role
from qcompile.target import Target

backends.load("npu").prepare()
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
