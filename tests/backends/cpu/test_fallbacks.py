"""What runs without a C++ compiler: which kernel, why, and that the plan says both."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.weights import random_weight, reference

from qcompile import backends
from qcompile.backends import kernels_for
from qcompile.backends.cpu import decoded, fields
from qcompile.edge import find_route
from qcompile.layout import QuantizedTensor
from qcompile.ops import encode_meaning
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


def test_the_decoding_op_is_well_formed() -> None:
    weight = random_weight(AffineSpec(3, 20, "offset", torch.float16), 48, 70)
    route = find_route("affine", weight.spec, fields.NAME)
    assert route is not None
    packed = route.apply(weight)
    op, parts = torch.ops.qcompile_cpu.decoded_linear, list(packed.parts.values())
    meaning = encode_meaning(packed)
    for dtype in (torch.float32, torch.float16):
        x, bias = torch.randn(2, 3, 70).to(dtype), torch.ones(48).to(dtype)
        torch.library.opcheck(op.default, (x, parts, meaning, bias))
    with pytest.raises(RuntimeError, match="qcompile_cpu: decoded_linear: x has 32 columns, w 70"):
        op(torch.randn(3, 32), parts, meaning, None)


def test_room_is_kept_between_calls_threads_and_modes() -> None:
    """Several sizes, some under inference mode, whose tensors none may write to outside."""
    weights = [random_weight(AffineSpec(4, 32, "zero"), n, 64 * n) for n in (3, 40, 8)]
    x = [torch.randn(2, 64 * n) for n in (3, 40, 8)]

    def run(numbers: tuple[int, ...] = (0, 1, 2)) -> list[torch.Tensor]:
        out = []
        for i in numbers:
            route = find_route("affine", weights[i].spec, fields.NAME)
            assert route is not None
            packed = route.apply(weights[i])
            parts, meaning = list(packed.parts.values()), encode_meaning(packed)
            out.append(torch.ops.qcompile_cpu.decoded_linear(x[i], parts, meaning, None))
        return out

    decoded._KEPT.floats = torch.empty(0)
    with torch.inference_mode():
        first = run()
    for found, again, weight, given in zip(first, run(), weights, x, strict=True):
        assert torch.equal(found, again)
        torch.testing.assert_close(found, given @ weight.dequantize().T, rtol=1e-4, atol=1e-3)
    with ThreadPoolExecutor(4) as pool:
        for results in pool.map(lambda _: run(), range(8)):
            assert all(torch.equal(a, b) for a, b in zip(results, first, strict=True))


@pytest.mark.skipif(CPU.compiler() == "eager", reason="no C++ compiler")
def test_inductor_leaves_it_alone_with_any_number_of_rows() -> None:
    weight = random_weight(AffineSpec(4, 32, "zero"), 48, 64)
    route = find_route("affine", weight.spec, fields.NAME)
    assert route is not None
    packed = route.apply(weight)
    parts, meaning = list(packed.parts.values()), encode_meaning(packed)

    def call(x: torch.Tensor) -> torch.Tensor:
        y = torch.ops.qcompile_cpu.decoded_linear(x + 1.0, parts, meaning, None)
        return torch.relu(y) * 2.0

    compiled = torch.compile(call, dynamic=True, fullgraph=True)
    for rows in (3, 17, 1, 0, 64):
        x = torch.randn(rows, 64)
        assert torch.equal(compiled(x), call(x)), rows
