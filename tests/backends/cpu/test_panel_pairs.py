"""Many rows in fast numerics over Q4_K, whose groups are summed in pairs where sums are small."""

from __future__ import annotations

import pytest
import torch
from support.gguf_blocks import finite_bytes
from support.threads import assert_same_on_threads

from qcompile import backends
from qcompile.backends.cpu.panel import NAME, arguments
from qcompile.edge import find_route
from qcompile.layout import QuantizedTensor
from qcompile.schemes import scheme_of
from qcompile.schemes.gguf.blocks import BLOCKS

backends.load("cpu").prepare()
scheme_of("gguf")
N, BLOCK = 200, 256


def weight_of(columns: int) -> QuantizedTensor:
    """Rows of Q4_K as panels, of ordinary sizes: what comes before them is left out."""
    data, spec = finite_bytes("q4_k", N + 10, columns // BLOCK)[10:], BLOCKS["q4_k"].spec
    weight = QuantizedTensor(spec, "gguf.q4_k", (N, columns), {"data": data})
    route = find_route(weight.layout, weight.spec, NAME)
    assert route is not None
    return route.apply(weight)


def fast(weight: QuantizedTensor, x: torch.Tensor) -> torch.Tensor:
    shape = arguments(weight.spec, weight.shape)
    parts = weight.parts["blob"], weight.parts["table"]
    found: torch.Tensor = torch.ops.qcompile_cpu.panel_linear(x, *parts, None, shape, 1)
    return found


def row_by_row(weight: QuantizedTensor, x: torch.Tensor) -> torch.Tensor:
    """The same products by the kernel for few rows, which knows no pairs."""
    return torch.cat([fast(weight, row[None]) for row in x])


def activations(rows: int, columns: int, kind: str) -> torch.Tensor:
    x = torch.randn(rows, columns)
    if kind == "one sign":  # sums that are too large for pairs
        x = 0.9 + 0.1 * x.clamp(-1, 1)
    if kind == "some of one sign":
        x[::7] = x[::7].sign() * x[::7].abs().clamp(0.5, 1)
        x[3::11] = 1 + 0.1 * x[3::11].clamp(-1, 1)
    if kind == "fine groups":  # sums of x that are rounded
        x[:, ::64] *= 300
    return x


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.double().norm())


@pytest.mark.parametrize("kind", ["any", "one sign", "some of one sign", "fine groups"])
@pytest.mark.parametrize(("rows", "columns"), [(9, 256), (17, 1024), (130, 512)])
def test_pairs_have_the_sums_of_other_kernels(rows: int, columns: int, kind: str) -> None:
    torch.manual_seed(rows)
    weight, x = weight_of(columns), activations(rows, columns, kind)
    expected = x.double() @ weight.dequantize().double().T
    found, one_by_one = fast(weight, x), row_by_row(weight, x)
    assert distance(found, one_by_one) <= (2e-4 if kind == "fine groups" else 1e-6)
    # No less precise than they are, but for a thousandth.
    assert distance(found, expected) <= 1.001 * distance(one_by_one, expected)


def test_a_row_does_not_depend_on_what_is_not_a_number_beside_it() -> None:
    torch.manual_seed(0)
    weight, x = weight_of(512), torch.randn(64, 512)
    x[5, 100], x[6, 3], x[20] = torch.nan, torch.inf, 0
    found, one_by_one = fast(weight, x), row_by_row(weight, x)
    assert found[5].isnan().all()
    assert found[6].isnan().all()
    assert (found[20] == 0).all()
    rest = [i for i in range(64) if i not in (5, 6)]
    assert distance(found[rest], one_by_one[rest]) <= 1e-6


@pytest.mark.parametrize("rows", [9, 40, 515])
def test_threads_change_nothing(rows: int) -> None:
    torch.manual_seed(0)
    weight, x = weight_of(1024), activations(rows, 1024, "some of one sign")
    assert_same_on_threads(lambda: fast(weight, x))
