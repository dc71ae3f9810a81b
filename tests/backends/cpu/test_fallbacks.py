"""What runs without a C++ compiler: which kernel, why, and that the plan says both."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.weights import random_weight, reference

from qcompile import backends
from qcompile.backends import kernels_for
from qcompile.backends.cpu import fields
from qcompile.edge import find_route
from qcompile.layout import QuantizedTensor
from qcompile.passes.select import select
from qcompile.plans import Entry
from qcompile.schemes import scheme_of
from qcompile.schemes.gguf.blocks import SPECS
from qcompile.site import EmbeddingSite, LinearSite, Site
from qcompile.spec import AffineSpec, ScaledSpec
from qcompile.target import Target
from qcompile.weight import WeightRef

CPU = backends.load("cpu")
scheme_of("gguf")
FP8 = ScaledSpec(torch.float8_e4m3fn, 64)
Spec = AffineSpec | ScaledSpec


def weight_of(spec: Spec) -> WeightRef:
    weight = random_weight(spec, 128, 256)
    if isinstance(spec, AffineSpec) and spec.order != "sequential":
        groups = torch.arange(256, dtype=torch.int32) // spec.group
        parts = {**weight.parts, "g_idx": groups[torch.randperm(256)]}
        weight = QuantizedTensor(spec, weight.layout, weight.shape, parts)
    return reference(weight)


def decided(
    sites: list[Site], dtype: torch.dtype, target: str = "cpu:avx512_vnni"
) -> tuple[Entry, ...]:
    return select(sites, kernels_for(CPU, dtype), Target.parse(target))


def name_of(entry: Entry) -> str:
    assert entry.kernel is not None
    return entry.kernel.name


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QCOMPILE_CXX", "none")


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize(
    ("spec", "dtype", "target", "name"),
    [
        (AffineSpec(4, 32, "zero"), torch.bfloat16, "cpu:avx512_vnni", "cpu.aten_linear"),
        (AffineSpec(8, 256, "symmetric"), torch.bfloat16, "cpu:avx2", "cpu.aten_linear"),
        (AffineSpec(6, 16, "symmetric"), torch.bfloat16, "cpu:amx", "cpu.aten_linear"),
        (AffineSpec(4, 32, "zero"), torch.bfloat16, "cpu:generic", "cpu.decoded_linear"),
        (AffineSpec(4, 32, "zero"), torch.bfloat16, "cpu:neon", "cpu.decoded_linear"),
        (AffineSpec(4, 20, "zero"), torch.bfloat16, "cpu:avx512_vnni", "cpu.decoded_linear"),
        (FP8, torch.bfloat16, "cpu:avx512_vnni", "cpu.decoded_linear"),
        (AffineSpec(4, 32, "zero"), torch.float32, "cpu:avx512_vnni", "cpu.decoded_linear"),
        (AffineSpec(4, 32, "zero"), torch.float16, "cpu:avx512_vnni", "cpu.decoded_linear"),
    ],
    ids=str,
)
def test_the_plan_chooses_by_dtype_and_vectors(
    spec: Spec, dtype: torch.dtype, target: str, name: str
) -> None:
    [entry] = decided([LinearSite("proj", weight_of(spec))], dtype, target)
    assert name_of(entry) == name
    [chosen] = [verdict for verdict in entry.verdicts if verdict.kernel == name]
    assert chosen.text.startswith("no C++ compiler was found: ")
    asked = {verdict.kernel for verdict in entry.verdicts}
    assert ("cpu.aten_linear" in asked) == (dtype == torch.bfloat16)
    assert entry.route is not None
    assert ("bfloat16" in (entry.route.error or "")) == (name == "cpu.aten_linear")


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize(
    ("dtype", "stem"), [(torch.bfloat16, "cpu.aten"), (torch.float32, "cpu.decoded")]
)
def test_an_embedding_is_packed_only_for_its_head(dtype: torch.dtype, stem: str) -> None:
    stored = QuantizedTensor(SPECS["q4_k"], "gguf.q4_k", (128, 256), {})
    weight = reference(stored)
    embedding, head = EmbeddingSite("embed", weight), LinearSite("head", weight)
    assert [name_of(e) for e in decided([embedding], dtype)] == ["reference.embedding"]
    both = decided([embedding, head], dtype)
    assert [name_of(e) for e in both] == [f"{stem}_embedding", f"{stem}_linear"]
    assert len({entry.layout for entry in both}) == 1


def test_a_compiler_is_preferred() -> None:
    if CPU.compiler() == "eager":
        pytest.skip("no C++ compiler")
    for dtype in (torch.float32, torch.bfloat16):
        site = LinearSite("proj", weight_of(AffineSpec(4, 32, "zero")))
        [entry] = decided([site], dtype)
        assert name_of(entry) == "cpu.panel_linear"
        assert not any("no C++ compiler" in verdict.text for verdict in entry.verdicts)


@pytest.mark.parametrize("order", ["permuted", "indexed"])
@pytest.mark.parametrize(
    ("bits", "form"), itertools.product(range(1, 9), ("symmetric", "zero", "offset"))
)
def test_fields_hold_any_order_and_cut_groups(bits: int, form: str, order: str) -> None:
    """Columns that fill neither the last byte nor the last group."""
    for group, (n, k) in itertools.product((3, 16, 64), ((1, 1), (7, 33), (20, 48))):
        spec = AffineSpec(bits, group, form, torch.float16, order)  # type: ignore[arg-type]
        plain = random_weight(spec, n, k)
        index = (torch.arange(k, dtype=torch.int32) // group)[torch.randperm(k)]
        weight = QuantizedTensor(spec, "affine", (n, k), {**plain.parts, "g_idx": index})
        route = find_route("affine", spec, fields.NAME)
        assert route is not None
        packed = route.apply(weight)
        packed.check("test")
        assert torch.equal(packed.dequantize(), weight.dequantize())
        picked = torch.tensor([n - 1, 0])
        assert torch.equal(packed.take_rows(picked).dequantize(), weight.dequantize()[picked])
