"""Products by Marlin operators: every argument of the calls, on operators that know only those."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.lowered import emulated_call, relative
from support.marlin import answer, kernel, packed
from support.marlin_ops import LINEAR, TYPES, installed
from support.weights import random_weight
from torch._subclasses.fake_tensor import FakeTensorMode

from qcompile.backends.cuda import marlin_call, marlin_edges, marlin_layout
from qcompile.backends.cuda.marlin_call import marlin_linear
from qcompile.backends.cuda.schemas import HALVES, Operator, type_id
from qcompile.kernel import Accept, Reject
from qcompile.layout import QuantizedTensor
from qcompile.spec import AffineSpec

VLLM, SGL, GPTQ16, GPTQBF = LINEAR


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
