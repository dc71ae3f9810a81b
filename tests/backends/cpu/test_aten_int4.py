"""aten's own int4 product: what it computes, how it packs, and our layout and op around it."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest
import torch
from support.weights import random_weight, reference

from qcompile import backends
from qcompile.backends.cpu import aten_int4, aten_linear
from qcompile.backends.cpu.probe import find_compiler
from qcompile.edge import find_route
from qcompile.errors import LayoutError
from qcompile.kernel import Reject
from qcompile.layout import QuantizedTensor
from qcompile.passes.weights.pack import pack
from qcompile.site import EmbeddingSite, LinearSite
from qcompile.spec import AffineSpec, LookupSpec
from qcompile.target import Target

CPU = backends.load("cpu")
LINEAR, EMBEDDING = aten_linear.AtenLinear(), CPU.KERNELS[4]
WIDE = Target("cpu", "avx2")
# One plane; two planes; halves of one plane and of two.
SPECS = (
    AffineSpec(4, 64, "zero", torch.float16),
    AffineSpec(8, 32, "symmetric", torch.float16),
    AffineSpec(3, 16, "offset"),
    AffineSpec(6, 16, "symmetric", torch.float16),
)


def packed(weight: QuantizedTensor) -> QuantizedTensor:
    route = find_route(weight.layout, weight.spec, aten_int4.NAME)
    assert route is not None
    return route.apply(weight)


def product(weight: QuantizedTensor, x: torch.Tensor) -> torch.Tensor:
    codes, scale_zero = weight.parts["codes"], weight.parts["scale_zero"]
    n = weight.shape[0]
    return torch.ops.qcompile_cpu.aten_linear(x, codes, scale_zero, None, n)  # type: ignore[no-any-return]


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


# **** aten ****


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("unit", aten_int4.UNITS)
def test_what_aten_computes(dtype: torch.dtype, unit: int) -> None:
    """Codes count from 8; a zero is added, as a float, after the scale."""
    torch.manual_seed(0)
    codes = torch.randint(0, 16, (64, 256), dtype=torch.int32)
    words = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    both, x = torch.randn(256 // unit, 64, 2).to(dtype), torch.randn(3, 256).to(dtype)
    found = torch.ops.aten._weight_int4pack_mm_for_cpu(x, words, unit, both)
    scale, zero = both.double().transpose(0, 1).repeat_interleave(unit, 1).unbind(-1)
    expected = x.double() @ ((codes - 8) * scale + zero).T
    assert relative(found, expected) <= max(torch.finfo(dtype).eps, 1e-6)


# Each line of a packed block is a run of bytes; see Lanes.
_ASK = """
import torch
from support.weights import random_weight
from qcompile import backends, spec
from qcompile.backends.cpu import aten_int4
from qcompile.edge import find_route
backends.load("cpu")
torch.manual_seed(0)
weight = random_weight(spec.AffineSpec(6, 16, "symmetric", torch.bfloat16), 100, 64)
packed = find_route("affine", weight.spec, aten_int4.NAME).apply(weight)
assert torch.equal(packed.dequantize(), weight.dequantize())
x = torch.randn(3, 64)
found = torch.ops.qcompile_cpu.aten_linear(x, *packed.parts.values(), None, 100)
torch.testing.assert_close(found, x @ weight.dequantize().T, rtol=1e-4, atol=1e-4)
narrow = torch.ops.qcompile_cpu.aten_linear(x.bfloat16(), *packed.parts.values(), None, 100)
assert (narrow.float() - found).norm() < 1e-2 * found.norm()
print(aten_int4.lanes().rows, aten_int4.lanes().order is None)
"""


@pytest.mark.parametrize("vectors", ["default", "avx2", "avx512"])
def test_blocks_are_read_as_aten_packs_them_for_any_vectors(vectors: str) -> None:
    """torch falls back to narrower vectors where the machine lacks the ones asked for."""
    tests = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    done = subprocess.run(
        [sys.executable, "-c", _ASK],
        env={**os.environ, "ATEN_CPU_CAPABILITY": vectors, "PYTHONPATH": tests},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() in (["64", "True"], ["32", "True"], ["32", "False"])
    if vectors == "default":
        assert done.stdout.split() == ["32", "False"]


# **** the layout ****


@pytest.mark.parametrize(
    ("bits", "form"), itertools.product(range(1, 9), ("symmetric", "zero", "offset"))
)
@pytest.mark.parametrize("group", [16, 32, 96, 192])
def test_what_bfloat16_holds_is_packed_exactly(bits: int, form: str, group: int) -> None:
    """Scales and zeros in the codes' own middle, or in room beside them; powers of two."""
    spec = AffineSpec(bits, group, form, torch.bfloat16)  # type: ignore[arg-type]
    weight = random_weight(spec, 65, 192)
    parts = dict(weight.parts)
    if form == "offset":
        parts["offset"] = -parts["scale"].float() * 2.0 ** (bits - 1)
    if form == "zero" and bits in (4, 8):  # no room beside the codes
        parts["zero"] = torch.full_like(parts["zero"], 1 << (bits - 1))
    weight = QuantizedTensor(spec, "affine", weight.shape, parts)
    assert torch.equal(packed(weight).dequantize(), weight.dequantize())


@pytest.mark.parametrize("table", [(-8, -3, 0, 7), (-127, -60, 3, 113), (0, 1, 2, 120)])
def test_tables_of_any_values_are_exact(table: tuple[int, ...]) -> None:
    weight = random_weight(LookupSpec(2, 32, table, torch.bfloat16), 70, 64)
    route = find_route("lookup", weight.spec, aten_int4.NAME)
    assert route is not None
    assert route.error is None
    found = route.apply(weight)
    assert len(found.parts["codes"]) == (1 if max(table) < 8 else 2)
    assert torch.equal(found.dequantize(), weight.dequantize())


def test_scales_are_rounded_once_and_the_plan_says_so() -> None:
    weight = random_weight(AffineSpec(4, 32, "symmetric", torch.float16), 40, 64)
    route = find_route("affine", weight.spec, aten_int4.NAME)
    assert route is not None
    assert route.error == "scales and zeros are rounded to bfloat16, by at most 2**-9 of each"
    rounded = {**weight.parts, "scale": weight.parts["scale"].bfloat16().half()}
    expected = QuantizedTensor(weight.spec, "affine", weight.shape, rounded).dequantize()
    assert torch.equal(route.apply(weight).dequantize(), expected)


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("n", [1, 48, 64, 130, 700])
def test_runs_of_rows_pack_as_the_whole_does(
    spec: AffineSpec, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qcompile.passes.weights.pack._BYTES_IN_FLIGHT", 64 * 128)
    weight = random_weight(spec, n, 128)
    route = find_route("affine", spec, aten_int4.NAME)
    assert route is not None
    whole, streamed = route.apply(weight), pack(reference(weight), route)
    for name, part in whole.parts.items():
        assert torch.equal(streamed.parts[name], part), name


def test_scales_that_leave_the_range_are_an_error() -> None:
    """One plane multiplies a scale by 16: nothing may become infinite on the way."""
    weight = random_weight(AffineSpec(8, 32, "symmetric"), 4, 64)
    weight.parts["scale"][1, 1] = 2.0**120
    assert packed(weight).dequantize().isfinite().all()
    weight.parts["scale"][1, 1] = 2.0**124
    with pytest.raises(LayoutError, match=r"at most 1\.33e\+36"):
        packed(weight)
    weight.parts["scale"][1, 1] = torch.inf  # it was so before
    assert not packed(weight).dequantize()[1].isfinite().all()


def test_permuted_columns_are_sorted() -> None:
    spec = AffineSpec(4, 32, "zero", torch.bfloat16, "permuted")
    plain = random_weight(spec, 70, 128)
    groups = (torch.arange(128, dtype=torch.int32) // 32)[torch.randperm(128)]
    weight = QuantizedTensor(spec, "affine", (70, 128), {**plain.parts, "g_idx": groups})
    found = packed(weight)
    found.check("test")
    assert relative(found.dequantize(), weight.dequantize()) < 2**-8
    answer = EMBEDDING.accepts(EmbeddingSite("embed", reference(found)), WIDE)
    assert answer == Reject("rows come out with their columns permuted (act-order)")


# **** the op ****


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 3, 17, 47, 48, 512])
def test_any_number_of_rows(spec: AffineSpec, rows: int) -> None:
    """Products, and from some number of rows on a decoded weight, agree with float64."""
    weight = packed(random_weight(spec, 48, 256))
    x = torch.randn(rows, 256).bfloat16()
    found = product(weight, x)
    assert found.dtype == torch.bfloat16
    assert found.shape == (rows, 48)
    if rows:
        expected = x.double() @ weight.dequantize().double().T
        assert relative(found, expected) <= 2**-8
    calls = len(weight.parts["codes"]) * weight.parts["scale_zero"].shape[1]
    if rows >= aten_linear._MANY_ROWS.get(calls, rows + 1):  # rounded once
        assert torch.equal(found, product(weight, x.float()).bfloat16())


def test_the_op_is_well_formed() -> None:
    weight = packed(random_weight(AffineSpec(6, 16, "offset"), 48, 64))
    parts, op = tuple(weight.parts.values()), torch.ops.qcompile_cpu
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(2, 3, 64).to(dtype)
        torch.library.opcheck(op.aten_linear.default, (x, *parts, torch.ones(48).to(dtype), 48))
    ids = torch.tensor([[1, 2, 47]])
    torch.library.opcheck(op.aten_embedding.default, (ids, *parts, 48, torch.bfloat16))
    with pytest.raises(RuntimeError, match="qcompile_cpu: aten_linear: x has 32 columns, w 64"):
        op.aten_linear(torch.randn(3, 32), *parts, None, 48)


@pytest.mark.skipif(not find_compiler(), reason="no C++ compiler")
def test_inductor_leaves_it_alone_with_any_number_of_rows() -> None:
    weight = packed(random_weight(AffineSpec(4, 32, "zero"), 48, 64))

    def call(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(product(weight, x + 1.0)) * 2.0

    compiled = torch.compile(call, dynamic=True, fullgraph=True)
    for rows in (3, 17, 1, 0, 64):
        x = torch.randn(rows, 64).bfloat16()
        assert torch.equal(compiled(x), call(x)), rows


# **** verdicts ****


@pytest.mark.parametrize(
    ("spec", "k", "target", "reason"),
    [
        (AffineSpec(4, 32, "zero"), 80, "cpu:avx2", "80 columns in groups of 32"),
        (AffineSpec(4, 48, "zero"), 96, "cpu:avx2", "96 columns in groups of 48"),
        (AffineSpec(4, 32, "zero"), 64, "cpu:generic", "not for cpu:generic"),
        (AffineSpec(4, 32, "zero"), 64, "cpu:neon", "not for cpu:neon"),
        (AffineSpec(4, 32, "zero"), 64, "cuda:sm90", "the target is cuda:sm90"),
    ],
)
def test_refusals(spec: AffineSpec, k: int, target: str, reason: str) -> None:
    routed = aten_int4.packed_spec(spec)
    assert routed is not None
    weight = reference(QuantizedTensor(routed, aten_int4.NAME, (16, k), {}))
    for kernel in (LINEAR, EMBEDDING):
        answer = kernel.accepts(LinearSite("proj", weight), Target.parse(target))
        assert isinstance(answer, Reject)
        assert reason in answer.reason


def test_groups_that_no_unit_divides_have_no_edge() -> None:
    for spec in (AffineSpec(4, 20, "zero"), AffineSpec(4, 32, "zero", order="indexed")):
        assert find_route("affine", spec, aten_int4.NAME) is None
    assert aten_int4.unit_of(4096, 4096) == 256
    assert aten_int4.unit_of(96, 192) == 32
    assert aten_int4.unit_of(128, 64) == 64
    assert aten_int4.unit_of(16, 48) is None
