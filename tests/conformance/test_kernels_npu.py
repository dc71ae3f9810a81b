"""Every Ascend kernel, under emulation, against the canonical op for everything it accepts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from support.lowered import emulate, emulated_call, relative
from support.weights import random_weight, reference

from qcompile import backends
from qcompile.backends import npu
from qcompile.backends.npu.layouts import DTYPES
from qcompile.edge import find_route
from qcompile.kernel import Kernel, Reject
from qcompile.layout import QuantizedTensor
from qcompile.site import EmbeddingSite, LinearSite, Site
from qcompile.spec import ActivationSpec, AffineSpec, LookupSpec
from qcompile.target import Target

backends.load("npu").prepare()
TARGET = Target("npu", "910b")


def matrix_kernels(dtype: torch.dtype) -> list[Kernel]:
    """Those for linears and embeddings; experts have a file of their own."""
    return [kernel for kernel in npu.kernels(dtype) if kernel.kind != "experts"]


# Sizes that fill words in both directions, in one, and in none; one group, several, a ragged one.
SHAPES = ((24, 64), (40, 96), (37, 128), (24, 100), (64, 520), (16, 32), (1, 48))
KERNELS = [kernel for dtype in DTYPES for kernel in matrix_kernels(dtype)]
NAMES = [f"{kernel.name}-{kernel.layout}" for kernel in KERNELS]


def specs() -> Iterator[AffineSpec | LookupSpec]:
    forms = ("symmetric", "zero", "offset")
    for bits, form in itertools.product((1, 2, 3, 4, 5, 6, 7, 8), forms):
        yield AffineSpec(bits, 32, form, torch.float16 if bits % 2 else torch.float32)  # type: ignore[arg-type]
    for group in (16, 20, 64, 128, 4096):
        yield AffineSpec(4, group, "zero", torch.float16)
        yield AffineSpec(8, group, "offset")
    yield AffineSpec(4, 32, "symmetric", torch.bfloat16)
    for bits in (2, 3, 5, 6, 7, 8):
        yield AffineSpec(bits, 16, "symmetric", torch.float16 if bits % 2 else torch.float32)
    yield AffineSpec(2, 16, "offset")
    yield AffineSpec(6, 48, "symmetric")
    for bits in (3, 4):
        yield LookupSpec(bits, 32, tuple(range(-5, -5 + 2**bits)), torch.float16)
    yield LookupSpec(4, 16, (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12))
    yield LookupSpec(2, 16, (-128, 0, 5, 119))


def offered(kernel: Kernel, weight: QuantizedTensor, bias: bool = True) -> QuantizedTensor | str:
    """The packed weight, or why the kernel refuses it."""
    assert kernel.layout is not None
    route = find_route(weight.layout, weight.spec, kernel.layout)
    if route is None:
        return "no edge"
    routed = replace(reference(weight), spec=route.spec, layout=kernel.layout)
    site: Site = EmbeddingSite("proj", routed)
    if kernel.kind == "linear":
        site = LinearSite("proj", routed, bias)
    answer = kernel.accepts(site, TARGET)
    if isinstance(answer, Reject):
        assert len(answer.reason) > 10
        return answer.reason
    packed = route.apply(weight)
    packed.check(kernel.name)
    return packed


@pytest.mark.parametrize("kernel", KERNELS, ids=NAMES)
@pytest.mark.parametrize("spec", specs(), ids=str)
def test_accepted_sites_agree_with_the_reference(
    kernel: Kernel, spec: AffineSpec | LookupSpec
) -> None:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if str(kernel.layout).endswith("bfloat16") else torch.float16
    for n, k in SHAPES:
        weight = random_weight(spec, n, k)
        packed = offered(kernel, weight)
        if isinstance(packed, str):
            continue
        exact = weight.dequantize()
        if kernel.kind == "embedding":
            ids = torch.tensor([[0, n - 1, n // 2], [0, 0, n - 1]])
            for index in (ids, ids.int()):
                found = emulate(kernel, packed, index, dtype)
                assert torch.equal(found, packed.dequantize()[ids].to(dtype))
                assert relative(found, exact[ids]) <= kernel.tolerance.relative_l2
            continue
        for rows, lead in ((1, ()), (5, (2,)), (17, ())):
            x = torch.randn(*lead, rows, k).to(dtype)
            bias = torch.randn(n).to(dtype) if rows != 5 else None
            expected = x.double() @ exact.double().T + (0.0 if bias is None else bias.double())
            found = emulate(kernel, packed, x, bias)
            assert found.dtype == dtype
            assert found.shape == (*lead, rows, n)
            assert relative(found, expected) <= kernel.tolerance.relative_l2
            wide = emulate(kernel, packed, x.float(), None if bias is None else bias.float(), True)
            stored = x.double() @ packed.dequantize().double().T
            stored += 0.0 if bias is None else bias.double()
            assert relative(wide, stored) < 1e-5


def test_what_is_accepted() -> None:
    """The kernels take what the operators take; nothing is refused for want of an edge."""
    takes = {
        kernel.name: {
            (spec.bits, spec.group)
            for spec in specs()
            if isinstance(spec, AffineSpec)
            and not isinstance(offered(kernel, random_weight(spec, 64, 480)), str)
        }
        for kernel in matrix_kernels(torch.float16)
    }
    by_group = {(4, 32), (4, 64), (4, 128), (4, 4096)}
    narrow = {(bits, 32) for bits in (1, 2, 3)} | by_group
    wide = narrow | {(bits, 32) for bits in (5, 6, 7, 8)} | {(8, 64), (8, 128), (8, 4096)}
    doubled = {(bits, 16) for bits in (2, 3, 4, 5, 6, 7)} | {(6, 48)}
    odd = {(4, 20)} | {(bits, 16) for bits in (2, 3, 4)}
    odder = odd | {(bits, 16) for bits in (5, 6, 7, 8)} | {(8, 20), (6, 48)}
    assert takes["npu.linear_int4"] == takes["npu.linear_int4_t"] == narrow
    assert takes["npu.linear_int8"] == takes["npu.linear_int8_t"] == wide
    assert takes["npu.linear_int4x2"] == takes["npu.embedding_int4x2"] == doubled
    assert takes["npu.embedding_int4"] == narrow | odd
    assert takes["npu.embedding_int8"] == wide | odder
    assert takes["npu.linear_w8a8"] == set()


@pytest.mark.parametrize("kernel", [k for k in KERNELS if k.kind == "linear"], ids=str)
def test_activations_of_any_shape_and_stride(kernel: Kernel) -> None:
    dtype = torch.bfloat16 if str(kernel.layout).endswith("bfloat16") else torch.float16
    group = 16 if kernel.name == "npu.linear_int4x2" else 64
    weight = random_weight(AffineSpec(4, group, "zero", dtype), 48, 128)
    packed = offered(kernel, weight)
    if isinstance(packed, str):
        assert kernel.name == "npu.linear_w8a8"
        return
    base = torch.randn(6, 10, 256).to(dtype)
    for x in (
        base[..., :128],
        base[..., ::2],
        base[:, 1:, :128],
        base[0, :, :128].expand(3, 10, 128),
        base[0, 0, :128],
        base[0, :8, :128].t().contiguous().t(),
    ):
        found = emulate(kernel, packed, x, None)
        assert found.shape == (*x.shape[:-1], 48)
        expected = x.double() @ weight.dequantize().double().T
        assert relative(found, expected) <= kernel.tolerance.relative_l2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_int8_by_int8_agrees_within_the_rounding_of_tokens(dtype: torch.dtype) -> None:
    kernel = next(k for k in matrix_kernels(dtype) if k.name == "npu.linear_w8a8")
    weight = random_weight(AffineSpec(8, 96, "symmetric"), 48, 96)
    asked = ActivationSpec(torch.int8, "token")
    route = find_route("affine", weight.spec, "npu.w8a8")
    assert route is not None
    routed = replace(reference(weight), spec=route.spec, layout="npu.w8a8", activations=asked)
    assert not isinstance(kernel.accepts(LinearSite("p", routed, True), TARGET), Reject)
    packed = route.apply(weight)
    x, bias = torch.randn(2, 7, 96).to(dtype), torch.randn(48).to(dtype)
    expected = x.double() @ weight.dequantize().double().T + bias.double()
    found = emulate(kernel, packed, x, bias)
    assert found.dtype == dtype
    assert 1e-4 < relative(found, expected) <= kernel.tolerance.relative_l2
    tokens = x.double() / x.double().abs().amax(-1, keepdim=True) * 127
    rounded = tokens.round() * x.double().abs().amax(-1, keepdim=True) / 127
    exact = rounded @ weight.dequantize().double().T + bias.double()
    assert relative(found, exact) <= torch.finfo(dtype).eps
    for other in (replace(asked, per="tensor"), replace(asked, dynamic=False), None):
        answer = kernel.accepts(LinearSite("p", replace(routed, activations=other)), TARGET)
        assert isinstance(answer, Reject)
        assert "the checkpoint wants activations" in answer.reason


def test_calls_bear_the_names_of_the_vendor() -> None:
    names = {
        "npu.linear_int4": {"npu.npu_weight_quant_batchmatmul.default"},
        "npu.linear_int4_t": {"npu.npu_weight_quant_batchmatmul.default"},
        "npu.linear_int8": {"npu.npu_weight_quant_batchmatmul.default"},
        "npu.linear_int8_t": {"npu.npu_weight_quant_batchmatmul.default"},
        "npu.linear_int4x2": {"npu.npu_weight_quant_batchmatmul.default"},
        "npu.linear_w8a8": {"npu.npu_dynamic_quant.default", "npu.npu_quant_matmul.default"},
        "npu.embedding_int4": set(),
        "npu.embedding_int8": set(),
        "npu.embedding_int4x2": set(),
    }
    weight = random_weight(AffineSpec(4, 4096, "symmetric", torch.float16), 48, 96)
    for kernel in matrix_kernels(torch.float16):
        assert kernel.layout is not None
        route = find_route("affine", weight.spec, kernel.layout)
        assert route is not None
        rest = torch.float16 if kernel.kind == "embedding" else None
        graph = emulated_call(kernel, route.apply(weight), rest)
        calls = {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}
        assert {name for name in calls if name.startswith("npu.")} == names[kernel.name]
