"""``triton_linear`` in the interpreter: against float64, within its own memory, in every tile."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.interpreted import InterpreterError, is_interpreted, strict, surrounded
from support.lowered import relative
from support.weights import random_weight

from qcompile.backends import load
from qcompile.backends.cuda import configs, launch
from qcompile.backends.cuda.coding import E2M1_TWICE, coding_of
from qcompile.backends.cuda.configs import Config
from qcompile.backends.cuda.jit.linear import linear, reduce_parts
from qcompile.backends.cuda.jit.rows import rows
from qcompile.backends.cuda.layouts import DTYPES, layout_name
from qcompile.edge import find_route
from qcompile.layout import QuantizedTensor
from qcompile.ops import encode_meaning
from qcompile.spec import AffineSpec, LookupSpec, ScaledSpec

load("cuda").prepare()
KERNELS = (linear, reduce_parts, rows)
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# What one rounding of weights, or none, and one of the result leave.
LIMIT = {torch.float16: 6e-4, torch.bfloat16: 4e-3, torch.float32: 1e-6}
# Sizes that fill tiles and blocks, and that fill neither; K below a plane; one output.
SHAPES = ((1, 80, 512), (5, 80, 336), (17, 40, 528), (3, 33, 200), (2, 130, 1088))
GROUPS = (16, 32, 48, 64, 96, 128, 4096)
Spec = AffineSpec | LookupSpec | ScaledSpec


def specs(dtype: torch.dtype) -> Iterator[Spec]:
    forms: Any = ("symmetric", "zero", "offset")
    groups = itertools.cycle(GROUPS)
    for bits, form in itertools.product((1, 2, 3, 4, 5, 6, 7, 8), forms):
        yield AffineSpec(bits, next(groups), form, dtype)
    for group in GROUPS:
        yield AffineSpec(4, group, forms[group % 3], dtype)
    for table, group in ((IQ4, 32), (E2M1_TWICE, 32), (E2M1_TWICE, 16), (IQ4, 256)):
        yield LookupSpec(4, group, table, dtype)
    yield LookupSpec(3, 16, (-43, -25, -8, 8, 25, 43), dtype)
    for group in (128, 4096):
        yield ScaledSpec(torch.float8_e4m3fn, group, dtype)


CASES = [
    pytest.param(spec, dtype, SHAPES[i % len(SHAPES)], id=f"{spec}-{str(dtype)[6:]}-{i}")
    for dtype in DTYPES
    for i, spec in enumerate(specs(dtype))
]


def packed(spec: Spec, n: int, k: int, dtype: torch.dtype) -> QuantizedTensor:
    weight = random_weight(spec, n, k)
    route = find_route(weight.layout, spec, layout_name(dtype))
    assert route is not None
    found = route.apply(weight)
    found.check("here")
    return found


def product(
    x: torch.Tensor, weight: QuantizedTensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    call: Any = torch.ops.qcompile.triton_linear
    found: torch.Tensor = call(x, list(weight.parts.values()), encode_meaning(weight), bias)
    return found


def expected(
    x: torch.Tensor, weight: QuantizedTensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    y = x.double() @ weight.dequantize().double().T
    return y if bias is None else y + bias.double()


def test_kernels_are_interpreted() -> None:
    assert all(is_interpreted(kernel) for kernel in KERNELS)


@pytest.mark.parametrize(("spec", "dtype", "shape"), CASES)
def test_products(spec: Spec, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    m, n, k = shape
    weight = packed(spec, n, k, dtype)
    x, bias = surrounded(torch.randn(m, k).to(dtype)), torch.randn(n).to(dtype)
    with strict(*KERNELS):
        found = product(x, weight, bias)
        wide = product(x.float(), weight)
    assert found.dtype == dtype
    assert relative(found, expected(x, weight, bias)) < LIMIT[dtype]
    assert relative(wide, expected(x, weight)) < LIMIT[torch.float32]


def every_tile() -> Iterator[Config]:
    for on_sum, parts in itertools.product((True, False), (1, 2, 5)):
        yield Config(16, 32, 4, 2, on_sum, parts)
    yield Config(64, 64, 8, 3, False)
    yield Config(8, 128, 4, 4, True, 3)


@pytest.mark.parametrize(("number", "config"), list(enumerate(every_tile())), ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tiles(number: int, config: Config, dtype: torch.dtype) -> None:
    """Parts of K that are empty, groups across blocks, rows and outputs that fill no tile."""
    torch.manual_seed(0)
    on_sum = (
        AffineSpec(4, 96, "zero", dtype),
        AffineSpec(3, 32, "symmetric", dtype),
        LookupSpec(4, 32, IQ4, dtype),
        AffineSpec(8, 4096, "zero", dtype),
    )
    specs = on_sum if config.on_sum else (*on_sum, AffineSpec(4, 64, "offset", dtype))
    m, n, k = (17, 40, 624) if number % 2 else (9, 64, 768)
    for spec in (specs[number % len(specs)], specs[-1]):
        weight = packed(spec, n, k, dtype)
        coding = coding_of(weight.spec, k)
        assert not isinstance(coding, str)
        x, bias = surrounded(torch.randn(m, k).to(dtype)), torch.randn(n).to(dtype)
        with strict(*KERNELS):
            found = launch.linear(x, weight.parts, coding, (n, k), bias, config, asm=False)
        assert relative(found, expected(x, weight, bias)) < LIMIT[dtype]


def test_an_access_outside_is_seen() -> None:
    """What the other tests rely on."""
    weight = packed(AffineSpec(4, 32, "zero", torch.float16), 40, 96, torch.float16)
    coding = coding_of(weight.spec, 96)
    assert not isinstance(coding, str)
    x, config = torch.randn(3, 96).half(), Config(16, 32, 4, 2, True)
    for name, shape in (("codes", (44, 96)), ("scale", (40, 128))):
        longer = {"codes": torch.zeros(9, 44, 32, dtype=torch.int16)}
        parts = {**weight.parts, **longer} if name == "scale" else dict(weight.parts)
        with strict(*KERNELS), pytest.raises(InterpreterError, match="OutOfBounds"):
            launch.linear(
                surrounded(torch.zeros(3, shape[1]).half()),
                parts,
                coding,
                shape,
                None,
                config,
                asm=False,
            )
    with strict(*KERNELS):
        launch.linear(x, weight.parts, coding, (40, 96), None, config, asm=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros_are_exact(dtype: torch.dtype) -> None:
    """Small whole numbers multiply and add without any rounding."""
    for bits in (2, 3, 4, 5, 6, 8):
        weight = packed(AffineSpec(bits, 64, "zero", dtype), 48, 128, dtype)
        parts = {**weight.parts, "scale": torch.ones_like(weight.parts["scale"])}
        weight = QuantizedTensor(weight.spec, weight.layout, weight.shape, parts)
        x = torch.zeros(3, 128, dtype=dtype)
        x[0, 5], x[1, 127], x[2, 64] = 1, -1, 1
        assert torch.equal(product(x, weight).double(), expected(x, weight))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_rows_decode_the_weight_in_runs(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, bias = torch.randn(configs.DECODE_ROWS, 96).to(dtype), torch.randn(40).to(dtype)
    for spec in (AffineSpec(4, 32, "offset", dtype), AffineSpec(6, 16, "symmetric", dtype)):
        weight = packed(spec, 40, 96, dtype)
        for at_once in (1 << 26, 96 * 24, 1):
            monkeypatch.setattr("qcompile.backends.cuda.operators.DECODED_AT_ONCE", at_once)
            with strict(*KERNELS):
                found = product(x, weight, bias)
            assert relative(found, expected(x, weight, bias)) < LIMIT[dtype]


def test_inputs_of_any_shape_and_stride() -> None:
    weight = packed(AffineSpec(4, 64, "zero", torch.float16), 48, 128, torch.float16)
    base = torch.randn(6, 10, 256).half()
    for x in (
        base[..., :128],
        base[..., ::2],
        base[:, 1:, :128],
        base[0, :, :128].expand(3, 10, 128),
        base[0, 0, :128],
        base[0, :8, :128].t().contiguous().t(),
        base[:0, :, :128],
        base[0, :0, :128],
    ):
        found = product(x, weight)
        assert found.shape == (*x.shape[:-1], 48)
        if x.numel():
            assert relative(found, expected(x, weight)) < LIMIT[torch.float16]


def test_sizes_of_one() -> None:
    for n, k in ((1, 16), (1, 1), (3, 7), (2, 16)):
        weight = packed(AffineSpec(4, 128, "zero", torch.float16), n, k, torch.float16)
        for m in (1, 2):
            x = torch.randn(m, k).half()
            with strict(*KERNELS):
                found = product(x, weight)
            assert relative(found, expected(x, weight)) < LIMIT[torch.float16]


def test_numbers_that_are_none_stay_in_their_row() -> None:
    weight = packed(AffineSpec(4, 32, "zero", torch.float16), 40, 96, torch.float16)
    x = torch.randn(5, 96).half()
    x[2, 7] = float("nan")
    found = product(x, weight)
    assert found[2].isnan().all()
    assert not found[[0, 1, 3, 4]].isnan().any()
