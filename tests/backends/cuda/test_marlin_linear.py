"""Products by Marlin operators: every argument of the calls, on operators that know only those."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.lowered import emulated_call, relative
from support.marlin_ops import LINEAR, TYPES, installed
from support.weights import random_weight, reference
from torch._subclasses.fake_tensor import FakeTensorMode

from qcompile.backends import cuda
from qcompile.backends.cuda import installed as lookup
from qcompile.backends.cuda import marlin_call, marlin_edges, marlin_layout
from qcompile.backends.cuda.marlin import MarlinLinear
from qcompile.backends.cuda.marlin_call import marlin_linear
from qcompile.backends.cuda.marlin_layout import ORDERS
from qcompile.backends.cuda.schemas import HALVES, Operator, type_id
from qcompile.edge import find_route
from qcompile.errors import LowerError
from qcompile.kernel import Accept, Reject
from qcompile.layout import QuantizedTensor
from qcompile.passes.select import select
from qcompile.site import EmbeddingSite, LinearSite
from qcompile.spec import AffineSpec
from qcompile.target import Target

TARGET = Target("cuda", "sm90")
VLLM, SGL, GPTQ16, GPTQBF = LINEAR


def kernel(bits: int, dtype: torch.dtype) -> MarlinLinear:
    [order] = [one for one in ORDERS if one.bits == bits and one.dtype == dtype]
    return MarlinLinear(order, dtype)


def packed(one: MarlinLinear, weight: QuantizedTensor) -> QuantizedTensor:
    route = find_route("affine", weight.spec, one.order.name)
    assert route is not None
    return route.apply(weight)


def answer(
    one: MarlinLinear, spec: AffineSpec, n: int = 128, k: int = 256, target: Target = TARGET
) -> Accept | Reject:
    route = find_route("affine", spec, one.order.name)
    assert route is not None
    ref = reference(random_weight(spec, n, k))
    routed = replace(ref, spec=route.spec, layout=one.order.name)
    return one.accepts(LinearSite("proj", routed, True), target)


def specs() -> Iterator[AffineSpec]:
    for group in (32, 64, 128, 4096):
        yield AffineSpec(4, group, "symmetric", torch.float16)
        yield AffineSpec(4, group, "zero", torch.float16)
        yield AffineSpec(8, group, "symmetric", torch.float16)
    yield AffineSpec(8, 64, "zero", torch.float16)
    yield AffineSpec(2, 64, "symmetric", torch.float16)
    yield AffineSpec(3, 128, "zero", torch.float16)
    yield AffineSpec(6, 32, "symmetric", torch.float16)
    yield AffineSpec(4, 64, "zero", torch.float16, order="permuted")
    yield AffineSpec(8, 4096, "symmetric", torch.float16, order="permuted")


def weight_of(spec: AffineSpec, n: int, k: int) -> QuantizedTensor:
    plain = random_weight(replace(spec, order="sequential"), n, k)
    if spec.order == "sequential":
        return plain
    groups = torch.arange(k) // spec.group
    order = torch.randperm(k, generator=torch.Generator().manual_seed(1))
    parts = {**plain.parts, "g_idx": groups[order].to(torch.int32)}
    return QuantizedTensor(spec, "affine", (n, k), parts)


@pytest.mark.parametrize("operator", LINEAR, ids=lambda one: one.name)
@pytest.mark.parametrize("spec", specs(), ids=str)
def test_calls_compute_the_product(operator: Operator, spec: AffineSpec) -> None:
    torch.manual_seed(0)
    bits = 4 if spec.bits <= 4 else 8
    for dtype in operator.dtypes:
        one = kernel(bits, dtype)
        with installed(operator) as calls:
            said = answer(one, replace(spec, order="sequential"))
            if not operator.takes(dtype, bits, spec.form == "zero"):
                assert isinstance(said, Reject)
                continue
            assert isinstance(said, Accept)
            assert operator.name in said.note
            for n, k in ((64, 320), (100, 200)):
                weight = weight_of(spec, n, k)
                ready = packed(one, weight)
                exact = weight.dequantize().double()
                for shape in ((17, k), (2, 3, k), (k,)):
                    x = torch.randn(shape).to(dtype)
                    bias = torch.randn(n).to(dtype) if shape[0] != 17 else None
                    found = emulated_call(one, ready, bias)(x)
                    expected = x.double() @ exact.T + (0.0 if bias is None else bias.double())
                    assert found.dtype == dtype
                    assert found.shape == (*shape[:-1], n)
                    assert found.is_contiguous()
                    assert relative(found, expected) <= one.tolerance.relative_l2
            assert len(calls) == 6
            assert all((c.get("b_bias") is not None) <= operator.bias for c in calls)


def test_any_stride_and_no_rows() -> None:
    one = kernel(4, torch.float16)
    weight = random_weight(AffineSpec(4, 64, "zero", torch.float16), 64, 128)
    run = emulated_call(one, packed(one, weight), None)
    base = torch.randn(6, 10, 257).half()
    with installed(VLLM):
        for x in (
            base[..., 1:129],
            base[..., :256:2],
            base[0, :, :128].expand(3, 10, 128),
            torch.randn(129).half()[1:],  # contiguous, at an address that vectors cannot read
        ):
            expected = x.double() @ weight.dequantize().double().T
            assert relative(run(x), expected) <= one.tolerance.relative_l2
    with installed(VLLM) as calls:
        assert run(base[:0, :, :128]).shape == (0, 10, 64)
        assert not calls


# **** that the operators notice what is wrong ****


def wrong(monkeypatch: pytest.MonkeyPatch, spec: AffineSpec, n: int = 128, k: int = 256) -> float:
    """The error of a product, packed and called after something was changed."""
    one = kernel(4 if spec.bits <= 4 else 8, torch.float16)
    weight, x, bias = random_weight(spec, n, k), torch.randn(5, k).half(), torch.randn(n).half()
    with installed(VLLM):
        found = emulated_call(one, packed(one, weight), bias * 100)(x)
    expected = x.double() @ weight.dequantize().double().T + 100 * bias.double()
    return relative(found, expected)


def same(values: torch.Tensor) -> torch.Tensor:
    return values


@pytest.mark.parametrize(
    ("place", "name", "group"),
    [
        (marlin_edges, "by_groups", 64),
        (marlin_edges, "by_rows", 4096),
        (marlin_call, "by_rows", 64),
        (marlin_layout, "by_groups", 64),
    ],
)
def test_a_wrong_permutation_is_seen(
    monkeypatch: pytest.MonkeyPatch, place: Any, name: str, group: int
) -> None:
    spec = AffineSpec(4, group, "zero", torch.float16)
    assert wrong(monkeypatch, spec) < 1e-3
    monkeypatch.setattr(place, name, same)
    assert wrong(monkeypatch, spec) > 0.1


@pytest.mark.parametrize(("form", "bits"), [("symmetric", 4), ("symmetric", 8), ("zero", 4)])
def test_a_wrong_type_is_seen(monkeypatch: pytest.MonkeyPatch, form: Any, bits: int) -> None:
    spec = AffineSpec(bits, 64, form, torch.float16)
    assert wrong(monkeypatch, spec) < 1e-3
    right = type_id(bits, 1 << (bits - 1) if form == "symmetric" else 0)
    for number in (*TYPES, 0):
        if number == right:
            continue
        monkeypatch.setattr(marlin_call, "type_id", lambda *given, number=number: number)
        with pytest.raises(RuntimeError, match=r"type|words"):
            wrong(monkeypatch, spec)


def test_numbers_of_types() -> None:
    found = {type_id(bits, bias): (bits, bias or None) for bits, bias in _KINDS}
    assert found == TYPES


_KINDS = ((4, 0), (4, 8), (8, 0), (8, 128))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda device: torch.zeros(64, dtype=torch.int32), "workspace of 64"),
        (lambda device: torch.zeros(1024, dtype=torch.int64), "workspace is torch.int64"),
        (lambda device: torch.ones(1024, dtype=torch.int32), "workspace must be zeros"),
    ],
)
def test_a_wrong_workspace_is_seen(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[torch.device], torch.Tensor], text: str
) -> None:
    monkeypatch.setattr(marlin_call, "workspace", make)
    with pytest.raises(RuntimeError, match=text):
        wrong(monkeypatch, AffineSpec(4, 64, "symmetric", torch.float16))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_fp32_reduce", False),
        ("use_atomic_add", True),
        ("is_zp_float", True),
        ("global_scale", torch.ones(1)),
        ("a_scales", torch.ones(1)),
    ],
)
def test_wrong_constants_are_seen(monkeypatch: pytest.MonkeyPatch, name: str, value: Any) -> None:
    monkeypatch.setitem(marlin_call._FIXED, name, value)
    with pytest.raises(RuntimeError, match="marlin: "):
        wrong(monkeypatch, AffineSpec(4, 64, "symmetric", torch.float16))


def test_every_argument_of_every_operator_is_known() -> None:
    for operator in LINEAR:
        values = dict.fromkeys(
            ("a", "workspace", "size_m", "size_n", "size_k", "b_q_weight", "b_scales", "b_zeros",
             "b_bias", "b_type_id", "b_q_type_id"), 0
        )  # fmt: skip
        given = marlin_call.arguments(operator, values)
        schema = torch._C.parse_schema(operator.name + operator.schema)
        assert len(given) == len(schema.arguments)


# **** what is refused ****


def test_a_package_that_is_missing() -> None:
    spec = AffineSpec(4, 128, "symmetric", torch.float16)
    for target in (Target("cuda", "sm80"), Target("cuda", "sm90"), Target("cuda")):
        said = answer(kernel(4, torch.float16), spec, target=target)
        assert isinstance(said, Reject)
        assert said.reason.startswith("packages vllm, sgl-kernel and gptqmodel are not installed: ")
        assert "_C::marlin_gemm (vllm 0.33.0)" in said.reason
    said = answer(kernel(8, torch.bfloat16), AffineSpec(8, 128, "zero", torch.bfloat16))
    assert isinstance(said, Reject)
    assert said.reason.startswith("package gptqmodel is not installed: the kernel calls gptqmodel_")


@pytest.mark.parametrize(
    ("spec", "target", "text"),
    [
        (AffineSpec(4, 16, "zero"), TARGET, "32, 64, 128 or all of K; the group is 16, K is 256"),
        (AffineSpec(4, 96, "zero"), TARGET, "the group is 96, K is 256 (vllm 0.33.0"),
        (AffineSpec(4, 64, "zero"), Target("cuda", "sm75"), "sm80 or newer; the target is sm75"),
        (AffineSpec(4, 64, "zero"), Target("cpu"), "must be a CUDA device; the target is cpu"),
    ],
)
def test_rules_are_quoted(spec: AffineSpec, target: Target, text: str) -> None:
    with installed(VLLM):
        said = answer(kernel(4, torch.float16), spec, target=target)
    assert isinstance(said, Reject)
    assert text in said.reason


def test_types_are_quoted() -> None:
    with installed(VLLM):
        said = answer(kernel(8, torch.float16), AffineSpec(6, 64, "zero"))
        assert isinstance(said, Reject)
        assert said.reason.startswith("package gptqmodel is not installed")
    one = replace(kernel(4, torch.float16), activations=torch.float32)
    with installed(VLLM):
        said = answer(one, AffineSpec(4, 64, "zero"))
    assert isinstance(said, Reject)
    assert "must be float16 or bfloat16; they are float32" in said.reason


def test_padding_and_the_gather_are_told() -> None:
    with installed(VLLM):
        said = answer(kernel(4, torch.float16), AffineSpec(4, 64, "zero", torch.float16), 100, 200)
        assert isinstance(said, Accept)
        assert said.note == "_C::marlin_gemm, padded from 100 x 200 to 128 x 256"
        said = answer(kernel(4, torch.float16), AffineSpec(4, 64, "zero", torch.float16))
        assert isinstance(said, Accept)
        assert said.note == "_C::marlin_gemm"


def test_the_schema_decides() -> None:
    one, spec = kernel(4, torch.float16), AffineSpec(4, 64, "symmetric", torch.float16)
    older = VLLM.schema.replace(", Tensor? a_scales", "")
    with installed(VLLM, schema=older):
        said = answer(one, spec)
        assert isinstance(said, Reject)
        assert "_C::marlin_gemm is _C::marlin_gemm(Tensor a, " in said.reason
        assert "not the one of vllm 0.33.0: _C::marlin_gemm(Tensor a" in said.reason
        with installed(SGL):
            said = answer(one, spec)
            assert isinstance(said, Accept)
            assert said.note == "sgl_kernel::gptq_marlin_gemm"


def test_the_first_that_fits_is_called() -> None:
    weight = random_weight(AffineSpec(8, 64, "zero", torch.float16), 64, 128)
    one, x = kernel(8, torch.float16), torch.randn(3, 128).half()
    run = emulated_call(one, packed(one, weight), None)
    with installed(VLLM) as first, installed(GPTQ16) as second:
        run(x)
    assert (len(first), len(second)) == (0, 1)


def test_a_graph_without_its_package_says_so() -> None:
    weight = random_weight(AffineSpec(4, 64, "zero", torch.float16), 64, 128)
    one = kernel(4, torch.float16)
    run = emulated_call(one, packed(one, weight), None)
    with pytest.raises(LowerError, match="not installed: the kernel calls"):
        run(torch.randn(3, 128).half())
    with (
        installed(VLLM),
        pytest.raises(LowerError, match=r"bfloat16, scales of torch\.float16"),
    ):
        run(torch.randn(3, 128).bfloat16())


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package ``vllm`` that is installed."""
    folder = tmp_path / "vllm"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('nothing of it shall run')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    lookup._load.cache_clear()
    yield folder
    lookup._load.cache_clear()


def test_libraries_of_an_installed_package(package: Path) -> None:
    spec = AffineSpec(4, 64, "symmetric", torch.bfloat16)
    said = answer(kernel(4, torch.bfloat16), spec)
    assert isinstance(said, Reject)
    assert "vllm is installed, but it has no _C_stable_libtorch*.so or _C.*.so" in said.reason
    assert "package gptqmodel is not installed" in said.reason
    lookup._load.cache_clear()
    (package / "_C_stable_libtorch.abi3.so").write_bytes(b"no library")
    said = answer(kernel(4, torch.bfloat16), spec)
    assert isinstance(said, Reject)
    assert "but _C_stable_libtorch.abi3.so does not load: " in said.reason


# **** tracing ****


def test_it_is_opaque_to_tracing() -> None:
    weight = random_weight(AffineSpec(4, 64, "zero", torch.float16), 100, 200)
    one = kernel(4, torch.float16)
    parts = packed(one, weight).parts
    bias = torch.randn(100).half()
    rest = (parts["weight"], parts["scale"], parts["zero"], None, bias, 100, 4)
    x = torch.randn(2, 3, 200).half()
    with installed(VLLM):
        torch.library.opcheck(marlin_linear, (x, *rest))
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            shape = marlin_linear(mode.from_tensor(x), *rest)
        found = marlin_linear(x, *rest)
        assert (shape.shape, shape.dtype) == (found.shape, found.dtype)

        def call(x: torch.Tensor) -> torch.Tensor:
            return marlin_linear(x, *rest) + 1  # type: ignore[no-any-return]

        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x), found + 1)
        exported = torch.export.export(_Module(call), (x,))
        assert torch.equal(exported.module()(x), found + 1)


class _Module(torch.nn.Module):
    def __init__(self, call: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(x)


def test_kinds_of_halves() -> None:
    assert {one.dtypes for one in LINEAR} == {HALVES, (torch.float16,), (torch.bfloat16,)}


# **** plans ****


def chosen(spec: AffineSpec, *sites: str) -> list[str | None]:
    """The kernels of sites that share a weight."""
    ref = reference(random_weight(spec, 128, 256))
    made = [LinearSite("p", ref) if s == "linear" else EmbeddingSite("p", ref) for s in sites]
    entries = select(made, cuda.kernels(torch.float16), TARGET)
    return [None if entry.kernel is None else entry.kernel.name for entry in entries]


def test_it_is_chosen_where_it_is_installed() -> None:
    four = AffineSpec(4, 64, "zero", torch.float16)
    assert chosen(four, "linear") == ["cuda.triton_linear"]
    with installed(VLLM):
        assert chosen(four, "linear") == ["cuda.marlin4"]
        assert chosen(AffineSpec(8, 64, "symmetric", torch.float16), "linear") == ["cuda.marlin8"]
        # Two bits are stored in four, which takes longer to read than the planes of Triton.
        assert chosen(AffineSpec(2, 64, "symmetric"), "linear") == ["cuda.triton_linear"]
        assert chosen(AffineSpec(4, 16, "zero"), "linear") == ["cuda.triton_linear"]
        # One packed copy serves a tied embedding too.
        shared = chosen(four, "linear", "embedding")
        assert shared == ["cuda.triton_linear", "cuda.triton_embedding"]
