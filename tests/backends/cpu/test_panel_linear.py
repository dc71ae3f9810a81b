"""The linear kernel: its numerics, its threads, its portable variant, what it refuses."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.threads import assert_same_on_threads
from support.weights import random_weight

from qcompile import backends
from qcompile.backends.cpu.panel import NAME, arguments
from qcompile.edge import find_route
from qcompile.layout import QuantizedTensor
from qcompile.spec import AffineSpec, LookupSpec

backends.load("cpu").prepare()
REPOSITORY = Path(__file__).resolve().parents[3]
SPECS = (
    AffineSpec(8, 4096, "symmetric", torch.float16),
    AffineSpec(4, 4096, "zero"),
    AffineSpec(4, 32, "offset"),
    AffineSpec(5, 20, "symmetric", torch.float16),
    AffineSpec(7, 64, "zero", torch.float16),
    LookupSpec(4, 32, tuple(range(-128, 128, 16)), torch.float16),
    LookupSpec(2, 16, (-3, -1, 1, 3)),
)


def product(
    weight: QuantizedTensor, x: torch.Tensor, bias: torch.Tensor | None = None, digits: int = 0
) -> torch.Tensor:
    route = find_route(weight.layout, weight.spec, NAME)
    assert route is not None
    packed = route.apply(weight)
    blob, table = packed.parts["blob"], packed.parts["table"]
    call = torch.ops.qcompile_cpu.panel_linear
    shape = arguments(packed.spec, packed.shape)
    return call(x, blob, table, bias, shape, digits)  # type: ignore[no-any-return]


def centred(spec: AffineSpec | LookupSpec, n: int, k: int) -> QuantizedTensor:
    """A weight whose zeros and offsets lie in the middle of the codes, as real ones do."""
    weight = random_weight(spec, n, k)
    parts = dict(weight.parts)
    if "zero" in parts:
        parts["zero"] = torch.full_like(parts["zero"], 1 << (spec.bits - 1))
    if "offset" in parts:
        parts["offset"] = -parts["scale"].float() * 2.0 ** (spec.bits - 1)
    return QuantizedTensor(weight.spec, weight.layout, weight.shape, parts)


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 23])
@pytest.mark.parametrize("shift", [0.0, 3.0])
def test_the_error_against_float64(spec: AffineSpec | LookupSpec, rows: int, shift: float) -> None:
    """Activations with a mean make long sums; they may not cost digits."""
    torch.manual_seed(rows)
    weight, x, bias = centred(spec, 90, 1234), torch.randn(rows, 1234) + shift, torch.randn(90)
    expected = x.double() @ weight.dequantize().double().T + bias
    found = product(weight, x, bias)
    assert float((found - expected).norm() / expected.norm()) <= 2e-6


def test_threads_change_nothing() -> None:
    weight = random_weight(AffineSpec(4, 32, "offset"), 1000, 256)
    for rows in (1, 3, 40):
        assert_same_on_threads(functools.partial(product, weight, torch.randn(rows, 256)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_results_are_float32_results_rounded_once(dtype: torch.dtype) -> None:
    """float16 is as exact as float32; what bfloat16 loses is far below its own rounding."""
    weight = random_weight(AffineSpec(4, 32, "symmetric"), 53, 96)
    for rows in (1, 9):
        x, bias = torch.randn(rows, 96).to(dtype), torch.randn(53).to(dtype)
        found, wide = product(weight, x, bias), product(weight, x.float(), bias.float())
        assert found.dtype == dtype
        if dtype == torch.float16:
            assert torch.equal(found, wide.to(dtype))
        limit = torch.finfo(dtype).eps / 2 * wide.abs() + 1e-4 * wide.norm() / wide.numel() ** 0.5
        assert bool(((found.float() - wide).abs() <= limit).all())


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_fewer_digits_of_the_activations(spec: AffineSpec | LookupSpec) -> None:
    """Two signed bytes hold 15 bits of the largest activation of a group, one holds 7."""
    torch.manual_seed(0)
    weight = centred(spec, 90, 1234)
    for rows in (1, 2, 4, 7):
        x = torch.randn(rows, 1234)
        expected = x.double() @ weight.dequantize().double().T
        for digits, least, most in ((1, 1e-3, 2e-2), (2, 5e-6, 2e-4), (3, 0.0, 5e-7)):
            found = product(weight, x, digits=digits)
            assert least <= float((found - expected).norm() / expected.norm()) <= most


def test_numbers_that_are_not_finite() -> None:
    weight = random_weight(AffineSpec(4, 32, "symmetric"), 16, 32)
    x = torch.ones(3, 32)
    x[1, 5], x[2, 0] = float("nan"), 3e38
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        found = product(weight, x.to(dtype))
        assert found[0].isfinite().all()
        assert found[1].isnan().all()
        assert not found[2].isfinite().all()


def test_what_it_refuses() -> None:
    weight = random_weight(AffineSpec(4, 32, "symmetric"), 16, 32)
    with pytest.raises(RuntimeError, match="columns of the weight"):
        product(weight, torch.ones(2, 31))
    with pytest.raises(RuntimeError, match="float32, float16 or bfloat16"):
        product(weight, torch.ones(2, 32, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="rows of the weight"):
        product(weight, torch.ones(2, 32), torch.ones(15))
    blob, table = torch.zeros(1, 8, dtype=torch.uint8), torch.zeros(16, dtype=torch.int8)
    with pytest.raises(RuntimeError, match="bytes of its shape"):
        torch.ops.qcompile_cpu.panel_linear(
            torch.ones(2, 32), blob, table, None, [16, 32, 4, 32, 0, 0], 0
        )


def test_the_portable_variant() -> None:
    """The tests of this file again, with the kernels that need no instruction set."""
    if os.environ.get("QCOMPILE_CPU_ISA") == "generic":
        pytest.skip("this is the portable variant")
    command = [sys.executable, "-m", "pytest", str(Path(__file__)), "-k", "half or error and 3.0"]
    environment = os.environ | {"QCOMPILE_CPU_ISA": "generic", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[100%]" in done.stdout
