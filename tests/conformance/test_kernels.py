"""Every kernel of a present backend against the canonical op, for everything it accepts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.weights import random_weight, reference
from torch import fx

from qcompile import backends, ops
from qcompile.backends.cpu.aten_int4 import ATEN_INT4
from qcompile.edge import find_route
from qcompile.kernel import Accept, Kernel, Reject
from qcompile.layout import QuantizedTensor
from qcompile.passes.select import select
from qcompile.site import EmbeddingSite, LinearSite
from qcompile.spec import AffineSpec, LookupSpec, ScaledSpec
from qcompile.target import Target

CPU = backends.load("cpu")
CPU.prepare()
# Kernels of experts are tested in test_experts.py.
KERNELS = [kernel for kernel in CPU.KERNELS if kernel.kind != "experts"]
# No shape with a single output: one sum may cancel to nearly nothing, and then no relative error is
# small. The last one has groups wide enough for sums to lose digits.
SHAPES = ((17, 8), (16, 32), (37, 203), (130, 96), (48, 520), (20, 4096))


def specs() -> Iterator[AffineSpec | LookupSpec | ScaledSpec]:
    forms = ("symmetric", "zero", "offset")
    for bits, form in itertools.product((1, 2, 3, 4, 5, 6, 7, 8), forms):
        yield AffineSpec(bits, 32, form, torch.float16 if bits % 2 else torch.float32)  # type: ignore[arg-type]
    for group in (8, 12, 16, 20, 64, 128, 4096):
        yield AffineSpec(4, group, "offset")
    yield AffineSpec(5, 20, "symmetric")
    yield AffineSpec(4, 32, "symmetric", torch.bfloat16)
    for bits in (2, 3, 4):
        yield LookupSpec(bits, 32, tuple(range(-5, -5 + 2**bits)), torch.float16)
    yield LookupSpec(3, 16, (8, 25, 43, -8, -25, -43))
    for group, scale in ((32, torch.float32), (20, torch.float16), (4096, torch.bfloat16)):
        yield ScaledSpec(torch.float8_e4m3fn, group, scale)


def packed_for(kernel: Kernel, weight: QuantizedTensor) -> QuantizedTensor:
    if kernel.layout is None:
        return weight
    route = find_route(weight.layout, weight.spec, kernel.layout)
    assert route is not None
    packed = route.apply(weight)
    packed.check(kernel.name)
    if route.error is None:
        assert torch.equal(packed.dequantize(), weight.dequantize())
    else:
        assert "bfloat16" in route.error
        assert error(packed.dequantize(), weight.dequantize()) <= kernel.tolerance.relative_l2
    return packed


def refusal(kernel: Kernel, weight: QuantizedTensor) -> str:
    """What a plan says where it cannot take the weight for this kernel; empty where it can."""
    site = (LinearSite if kernel.kind == "linear" else EmbeddingSite)("proj", reference(weight))
    [entry] = select([site], [kernel], Target("cpu", "avx2"))
    return "" if entry.kernel else entry.verdicts[0].text


def run(kernel: Kernel, packed: QuantizedTensor, x: torch.Tensor, *rest: Any) -> torch.Tensor:
    """The kernel's own call, as ``lower`` would emit it."""
    owner = torch.nn.Module()
    graph = fx.Graph()
    first = graph.placeholder("x")
    parts = []
    for name, part in packed.parts.items():
        owner.register_buffer(name, part)
        parts.append(graph.get_attr(name))
    if rest and isinstance(rest[0], torch.Tensor):
        owner.register_buffer("bias", rest[0])
        rest = (graph.get_attr("bias"),)
    target = ops.linear if kernel.kind == "linear" else ops.embedding
    canonical = graph.call_function(target, (first, parts, ops.encode_meaning(packed), *rest))
    with graph.inserting_before(canonical):
        graph.output(kernel.emit(graph, canonical, parts, packed))
    return fx.GraphModule(owner, graph)(x)  # type: ignore[no-any-return]


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The relative L2 error that ``Tolerance`` bounds."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("spec", specs(), ids=str)
def test_accepted_sites_agree_with_the_reference(
    kernel: Kernel, spec: AffineSpec | LookupSpec | ScaledSpec
) -> None:
    torch.manual_seed(0)
    for n, k in SHAPES:
        weight = random_weight(spec, n, k)
        if refused := refusal(kernel, weight):
            assert kernel.layout == ATEN_INT4.name, refused
            assert refused.startswith("no edge") or f"{k} columns in groups of" in refused
            continue
        packed = packed_for(kernel, weight)
        exact = packed.dequantize()
        if kernel.kind == "embedding":
            ids = torch.tensor([[0, n - 1, n // 2], [0, 0, n - 1]])
            for index, dtype in itertools.product(
                (ids, ids.int()), (torch.float32, torch.bfloat16)
            ):
                found = run(kernel, packed, index, dtype)
                assert torch.equal(found, exact[ids].to(dtype))
            continue
        # What depends on the number of rows is the choice of a native kernel.
        for rows in (1, 2, 3, 4, 5, 17) if kernel.layout else (1, 17):
            x, bias = torch.randn(rows, k), torch.randn(n) if rows % 2 else None
            expected = x.double() @ exact.double().T + (0.0 if bias is None else bias.double())
            found = run(kernel, packed, x, bias)
            assert error(found, expected) <= kernel.tolerance.relative_l2
            if kernel.layout == ATEN_INT4.name:  # the dtype that it is made for
                expected = x.bfloat16().double() @ exact.double().T
                found = run(kernel, packed, x.bfloat16(), None)
                assert error(found, expected) <= kernel.tolerance.relative_l2 + 2**-9


@pytest.mark.parametrize("kernel", [k for k in CPU.KERNELS if k.kind == "linear"], ids=str)
def test_activations_of_any_shape_stride_and_dtype(kernel: Kernel) -> None:
    weight = random_weight(AffineSpec(4, 32, "offset"), 48, 64)
    packed = packed_for(kernel, weight)
    exact = packed.dequantize()
    base = torch.randn(6, 10, 128)
    cases = (
        base[..., :64],
        base[..., ::2],
        base[:, 1:, :64],
        base[0, :, :64].expand(3, 10, 64),
        base[0, 0, :64],
        base[:0, :, :64],
        base[0, : 64 // 8, :64].t().contiguous().t(),
    )
    for x in cases:
        found = run(kernel, packed, x, None)
        assert found.shape == (*x.shape[:-1], 48)
        torch.testing.assert_close(found, x @ exact.T, rtol=1e-4, atol=1e-4)
    for dtype in (torch.bfloat16, torch.float16):
        x = base[0, :, :64].to(dtype)
        found = run(kernel, packed, x, torch.ones(48, dtype=dtype))
        assert found.dtype == dtype
        expected = (x.float() @ exact.T + 1.0).to(dtype)
        assert error(found, expected) <= torch.finfo(dtype).eps


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_a_refusal_says_why(kernel: Kernel) -> None:
    weight = random_weight(AffineSpec(4, 32, "offset"), 16, 64)
    site = (LinearSite if kernel.kind == "linear" else EmbeddingSite)("proj", reference(weight))
    assert isinstance(kernel.accepts(site, Target("cpu", "avx2")), (Accept, Reject))
    answer = kernel.accepts(site, Target("cuda", "sm90"))
    assert isinstance(answer, Reject)
    assert "cuda:sm90" in answer.reason


def test_a_group_index_is_decoded_in_torch() -> None:
    spec = AffineSpec(4, 32, "zero", order="indexed")
    weight = random_weight(spec, 16, 64)
    order = torch.randperm(64).to(torch.int32) % 2
    indexed = QuantizedTensor(spec, "affine", (16, 64), {**weight.parts, "g_idx": order})
    [entry] = select([LinearSite("proj", reference(indexed))], CPU.KERNELS, Target("cpu", "avx2"))
    assert entry.kernel is not None
    assert entry.kernel.name == "cpu.decoded_linear"
    [refused] = [v for v in entry.verdicts if v.kernel == "cpu.panel_linear"]
    assert refused.cost is None


def test_ops_are_well_formed() -> None:
    weight = random_weight(AffineSpec(4, 32, "offset"), 48, 64)
    packed = packed_for(CPU.KERNELS[0], weight)
    shape = [48, 64, 4, 32, 2, 0]
    blob, table = packed.parts["blob"], packed.parts["table"]
    native = torch.ops.qcompile_cpu
    x, ids = torch.randn(2, 3, 64), torch.tensor([[1, 2, 47]])
    torch.library.opcheck(native.panel_linear.default, (x, blob, table, torch.ones(48), shape, 0))
    torch.library.opcheck(native.panel_embedding.default, (ids, blob, table, shape, torch.float32))
    parts, meaning = list(weight.parts.values()), ops.encode_meaning(weight)
    torch.library.opcheck(ops.linear, (x, parts, meaning, torch.ones(48)))
    torch.library.opcheck(ops.embedding, (ids, parts, meaning, torch.bfloat16))


@pytest.mark.parametrize("kernel", [k for k in CPU.KERNELS if k.kind == "embedding"], ids=str)
@pytest.mark.parametrize("bad", [-1, 48])
def test_ids_out_of_range_are_refused(kernel: Kernel, bad: int) -> None:
    packed = packed_for(kernel, random_weight(AffineSpec(4, 32, "offset"), 48, 64))
    with pytest.raises((IndexError, RuntimeError), match=r"outside 0\.\.47"):
        run(kernel, packed, torch.tensor([0, bad]), torch.float32)
