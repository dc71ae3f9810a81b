"""Edges to the operators' operands: what is exact, what is bounded, what is refused."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from support.pack_awq import interleave
from support.weights import random_weight

from qcompile import backends
from qcompile.backends.npu import words
from qcompile.backends.npu.edges import apply
from qcompile.backends.npu.layouts import DTYPES, HALVES, ORDERS, W8A8, Order
from qcompile.edge import edges, find_route
from qcompile.errors import LayoutError
from qcompile.layout import QuantizedTensor, layout_of
from qcompile.schemes import scheme_of
from qcompile.schemes.words import pack_words
from qcompile.spec import AffineForm, AffineSpec, LookupSpec

backends.load("npu").prepare()
for _scheme in ("gptq", "awq", "compressed_tensors"):
    scheme_of(_scheme)
N, K = 24, 96
FORMS: tuple[AffineForm, ...] = ("symmetric", "zero", "offset")
INT4_F16 = next(o for o in ORDERS if o.bits == 4 and o.rows_first and o.dtype == torch.float16)


def routed(weight: QuantizedTensor, order: Order) -> QuantizedTensor:
    route = find_route(weight.layout, weight.spec, order.name)
    assert route is not None
    packed = route.apply(weight)
    packed.check(order.name)
    exact = torch.equal(packed.dequantize(), weight.dequantize())
    assert exact or route.error is not None
    return packed


def reach(weight: QuantizedTensor) -> torch.Tensor:
    """The largest value, in magnitude, that the group of each value can hold."""
    spec, parts = weight.spec, weight.parts
    assert isinstance(spec, AffineSpec)
    scale, top = parts["scale"].float(), (1 << spec.bits) - 1
    low = parts["offset"] if spec.form == "offset" else -scale * (1 << (spec.bits - 1))
    if spec.form == "zero":
        low = -scale * parts["zero"]
    largest = torch.maximum(low.abs(), (low + scale * top).abs())
    return largest.repeat_interleave(spec.group, 1)[:, : weight.shape[1]]


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.name)
@pytest.mark.parametrize(("bits", "form"), itertools.product(range(1, 9), FORMS))
def test_values_move_as_little_as_the_edge_says(bits: int, form: AffineForm, order: Order) -> None:
    for scale in (torch.float16, torch.bfloat16, torch.float32):
        spec = AffineSpec(bits, 32, form, scale)
        weight = random_weight(spec, N, K, seed=bits)
        if bits > order.bits:
            assert find_route("affine", spec, order.name) is None
            continue
        packed = routed(weight, order)
        moved = (packed.dequantize() - weight.dequantize()).abs()
        assert bool((moved <= torch.finfo(order.dtype).eps * reach(weight)).all())
        route = find_route("affine", spec, order.name)
        assert route is not None
        assert (route.error is None) == (scale == order.dtype and form != "offset")


@pytest.mark.parametrize("order", [o for o in ORDERS if o.bits == 8], ids=lambda o: o.name)
def test_tables_of_bytes_are_exact(order: Order) -> None:
    for table in (tuple(range(-8, 8)), (0, 1, 2, 3, 4, 6, 8, 12), (-127, 113, 0, 4)):
        weight = random_weight(LookupSpec(4, 32, table, order.dtype), N, K)
        assert torch.equal(routed(weight, order).dequantize(), weight.dequantize())


@pytest.mark.parametrize("order", HALVES, ids=lambda order: order.name)
@pytest.mark.parametrize(("bits", "form"), itertools.product(range(1, 9), FORMS))
def test_halves_move_values_no_further(bits: int, form: AffineForm, order: Order) -> None:
    """Groups of 16, doubled: what their scales and offsets lose, and nothing of the codes."""
    for scale in (torch.float16, torch.bfloat16, torch.float32):
        spec = AffineSpec(bits, 16, form, scale)
        if bits == 8 or (bits > 4 and form != "symmetric"):
            assert find_route("affine", spec, order.name) is None
            continue
        weight = random_weight(spec, N, K, seed=bits)
        packed = routed(weight, order)
        moved = (packed.dequantize() - weight.dequantize()).abs()
        assert bool((moved <= torch.finfo(order.dtype).eps * reach(weight)).all())
        route = find_route("affine", spec, order.name)
        assert route is not None
        assert (route.error is None) == (scale == order.dtype and form != "offset")


@pytest.mark.parametrize("order", HALVES, ids=lambda order: order.name)
def test_halves_of_tables_and_of_act_order(order: Order) -> None:
    for table in (tuple(range(-8, 8)), (-128, -9, -8, 7, 8, 119)):
        weight = random_weight(LookupSpec(4, 16, table, order.dtype), N, K)
        assert torch.equal(routed(weight, order).dequantize(), weight.dequantize())
    assert find_route("lookup", LookupSpec(4, 16, (0, 120)), order.name) is None
    spec = AffineSpec(6, 16, "symmetric", order.dtype, order="permuted")
    weight = random_weight(replace(spec, order="sequential"), N, K)
    group = (torch.randperm(K, generator=torch.Generator().manual_seed(3)) // 16).to(torch.int32)
    permuted = QuantizedTensor(spec, "affine", (N, K), {**weight.parts, "g_idx": group})
    assert torch.equal(routed(permuted, order).dequantize(), permuted.dequantize())
    route = find_route("affine", replace(spec, order="sequential"), order.name)
    assert route is not None
    with pytest.raises(LayoutError, match="groups of 16 in 24 columns"):
        route.apply(random_weight(replace(spec, order="sequential"), N, 24))


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.name)
def test_zero_points_at_both_ends(order: Order) -> None:
    """Offsets run from 2**(b-1) down to 2**(b-1) - 2**b, the latter for the zero 255 + 1."""
    for bits in (2, 3, 4, 8):
        if bits > order.bits:
            continue
        weight = random_weight(AffineSpec(bits, 32, "zero", order.dtype), N, K)
        for zero in (0, 1, (1 << bits) - 1, 1 << bits):
            parts = {**weight.parts, "zero": torch.full_like(weight.parts["zero"], zero)}
            packed = routed(replace(weight, parts=parts), order)
            assert float(packed.parts["offset"].float().unique()) == (1 << (bits - 1)) - zero


def test_the_sign_trap() -> None:
    """The operator computes (w + offset) * scale: the offset is the middle MINUS the zero."""
    spec = AffineSpec(4, 32, "zero", torch.float16)
    weight = random_weight(spec, 8, 64)
    packed = routed(weight, INT4_F16)
    wrong = {**packed.parts, "offset": -packed.parts["offset"]}
    assert not torch.equal(replace(packed, parts=wrong).dequantize(), weight.dequantize())
    assert torch.equal(packed.parts["offset"], (8 - weight.parts["zero"]).half())


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.name)
def test_act_order_sorts_columns(order: Order) -> None:
    spec = AffineSpec(4, 32, "zero", order.dtype, order="permuted")
    weight = random_weight(replace(spec, order="sequential"), N, K)
    group = (torch.randperm(K, generator=torch.Generator().manual_seed(3)) // 32).to(torch.int32)
    permuted = QuantizedTensor(spec, "affine", (N, K), {**weight.parts, "g_idx": group})
    packed = routed(permuted, order)
    assert torch.equal(packed.dequantize(), permuted.dequantize())
    assert torch.equal(group[packed.parts["columns"].long()].sort().values, group.sort().values)
    assert find_route("affine", replace(spec, order="indexed"), order.name) is None


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.name)
@pytest.mark.parametrize(
    ("scale", "offset"),
    [
        (0.0, 0.5),
        (0.0, -3.0),
        (0.0, 0.0),
        (1e-9, 0.25),
        (2e-8, 1e-3),
        (-1e-8, 2.0),
        (1e-6, 1e-2),
        (1e-5, 30.0),
        (4e-8, 4e-8),
    ],
)
def test_groups_that_are_nearly_constant_keep_their_minimum(
    scale: float, offset: float, order: Order
) -> None:
    spec = AffineSpec(4, 32, "offset")
    weight = random_weight(spec, N, K)
    parts = dict(weight.parts)
    for name, value in (("scale", scale), ("offset", offset)):
        parts[name] = parts[name].clone()
        parts[name][:, 1] = value
    odd = replace(weight, parts=parts)
    moved = (routed(odd, order).dequantize() - odd.dequantize()).abs()
    bound = torch.finfo(order.dtype).eps * reach(odd)
    if order.dtype == torch.float16:
        bound += 2.0**-25 * 16  # steps of a code below the normal numbers
    assert bool((moved <= bound).all())


def test_what_a_dtype_cannot_hold_is_refused() -> None:
    weight = random_weight(AffineSpec(4, 32, "symmetric"), 8, 64)
    weight.parts["scale"][0, 0] = 1e6
    with pytest.raises(LayoutError, match=r"1e\+06[\s\S]*bfloat16"):
        apply(weight, INT4_F16)
    weight = random_weight(AffineSpec(8, 32, "offset"), 8, 64)
    weight.parts["scale"][0, 0], weight.parts["offset"][0, 0] = 1e-3, 90.0
    order = next(o for o in ORDERS if o.bits == 8 and o.dtype == torch.float16)
    with pytest.raises(LayoutError, match="steps of the code"):
        apply(weight, order)
    weight = random_weight(AffineSpec(4, 32, "zero"), 8, 64)
    weight.parts["zero"][0, 0] = 4000
    with pytest.raises(LayoutError, match="a zero point of 4000"):
        apply(weight, INT4_F16)


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.name)
def test_runs_of_rows_are_packed_alike(order: Order) -> None:
    for spec in (AffineSpec(4, 32, "offset"), AffineSpec(3, 32, "zero", torch.float16)):
        weight = random_weight(spec, N, K)
        whole, run = apply(weight, order), apply(weight.take_rows(slice(8, 16)), order)
        part = whole.take_rows(slice(8, 16))
        assert all(torch.equal(run.parts[name], part.parts[name]) for name in run.parts)
        meta = layout_of(order.name).empty(whole.spec, whole.shape, device="meta")
        assert {k: (v.shape, v.dtype) for k, v in meta.items()} == {
            k: (v.shape, v.dtype) for k, v in whole.parts.items()
        }


# **** direct edges ****


def stored_words(source: str, form: AffineForm, scale: torch.dtype) -> QuantizedTensor:
    """A random weight as a scheme stores it."""
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (N, K), generator=generator).to(torch.uint8)
    vector = torch.randn(N, K // 32, generator=generator).to(scale)
    zeros = torch.randint(0, 16, (N, K // 32), generator=generator).to(torch.uint8)
    rows_first = source in ("awq.gemv", "ct.packed")
    if source == "awq":
        packed = interleave(codes.t().long().numpy())
    elif source == "gptq":
        packed = pack_words(codes.t().contiguous(), 4, 0)
    else:
        packed = pack_words(codes, 4, 1)
    names = ("packed", "scale") if source == "ct.packed" else ("qweight", "scales")
    vectors = [v if rows_first else v.t().contiguous() for v in (vector, zeros)]
    parts = {names[0]: packed, names[1]: vectors[0]}
    if form == "zero":
        parts["zeros"] = vectors[1]
    return QuantizedTensor(AffineSpec(4, 32, form, scale), source, (N, K), parts)


@pytest.mark.parametrize("order", [o for o in ORDERS if o.bits == 4], ids=lambda o: o.name)
@pytest.mark.parametrize("form", ["symmetric", "zero"])
@pytest.mark.parametrize("source", [source.layout for source in words.SOURCES])
def test_a_direct_edge_equals_the_composed_path(
    source: str, form: AffineForm, order: Order
) -> None:
    for scale in DTYPES:
        weight = stored_words(source, form, scale)
        weight.check(source)
        route = find_route(source, weight.spec, order.name)
        unpacked = find_route(source, weight.spec, "affine")
        assert route is not None
        assert unpacked is not None
        assert len(route.edges) == 1
        direct, composed = route.apply(weight), apply(unpacked.apply(weight), order)
        direct.check(order.name)
        assert direct.spec == composed.spec
        assert direct.parts.keys() == composed.parts.keys()
        for name, part in direct.parts.items():
            assert torch.equal(part, composed.parts[name]), name
        assert (route.error is None) == (scale == order.dtype)


def test_every_edge_of_the_backend_is_tried_here() -> None:
    sources = {e.source for e in edges() if e.dest.startswith("npu.") and "experts" not in e.source}
    whole = {f"npu.int8.kn.{name}" for name in ("float16", "bfloat16")}  # with the experts' tests
    assert sources == {"affine", "lookup", *(source.layout for source in words.SOURCES), *whole}


def test_eight_bits_by_eight_bits() -> None:
    weight = random_weight(AffineSpec(8, K, "symmetric", torch.bfloat16), N, K)
    route = find_route("affine", weight.spec, W8A8)
    assert route is not None
    assert route.error is None
    packed = route.apply(weight)
    packed.check(W8A8)
    assert torch.equal(packed.dequantize(), weight.dequantize())
    assert find_route("affine", AffineSpec(8, K, "zero"), W8A8) is None
    with pytest.raises(LayoutError, match="3 groups"):
        route.apply(random_weight(AffineSpec(8, 32, "symmetric"), N, K))
