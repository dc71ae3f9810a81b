"""The formulas of rounding to nearest, and groups that tempt them to divide by zero."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qcompile.errors import OptionError
from qcompile.quantizers.grid import Grid
from qcompile.quantizers.rtn import quantize_rtn
from qcompile.spec import AffineSpec

HALF = torch.float16


def spec(bits: int, group: int, sym: bool) -> AffineSpec:
    return AffineSpec(bits, group, "symmetric" if sym else "zero", HALF)


def test_asymmetric_codes_round_before_the_zero_is_added() -> None:
    w = torch.tensor([[-1.0, -0.6, 0.0, 0.25, 0.52, 1.0, 1.45, 2.0]])
    got = quantize_rtn(w, spec(4, 8, False))
    assert got.parts["codes"].tolist() == [[0, 2, 5, 6, 8, 10, 12, 15]]
    assert got.parts["zero"].tolist() == [[5]]
    assert got.parts["scale"].item() == torch.tensor(0.2, dtype=HALF).item()


def test_a_positive_group_takes_zero_as_its_minimum() -> None:
    w = torch.tensor([[0.3, 0.6, 0.9, 1.2, 1.5, 0.75, 0.45, 0.15]])
    got = quantize_rtn(w, spec(4, 8, False))
    assert got.parts["zero"].tolist() == [[0]]
    assert got.parts["codes"].max() == 15
    assert (got.dequantize() - w).abs().max() <= got.parts["scale"].float().max() / 2


def test_symmetric_codes() -> None:
    w = torch.tensor([[-1.5, -0.7, 0.0, 0.29, 1.5, 0.91]])  # scale 2 * 1.5 / 15, about 0.2
    got = quantize_rtn(w, spec(4, 6, True))
    scale = torch.tensor(2 * 1.5 / 15).to(HALF)
    assert got.parts["scale"].item() == scale.item()
    expected = (torch.round(w / scale.float()) + 8).clamp(0, 15)
    assert torch.equal(got.parts["codes"].float(), expected)


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("tiny", [0.0, 1e-7, 1e-12, 1e-30])
def test_tiny_rows_stay_finite_and_leave_others_alone(tiny: float, sym: bool) -> None:
    torch.manual_seed(0)
    w = torch.randn(6, 64)
    alone = quantize_rtn(w[::2], spec(4, 32, sym))
    w[1::2] = w[1::2] / w[1::2].abs().amax(1, keepdim=True) * tiny
    got = quantize_rtn(w, spec(4, 32, sym))
    assert all(torch.isfinite(part.float()).all() for part in got.parts.values())
    error = (got.dequantize() - w).abs().amax(1)
    assert (error[1::2] <= w[1::2].abs().amax(1)).all()
    assert torch.equal(got.dequantize()[::2], alone.dequantize())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
def test_a_weight_beyond_float16_scales_is_refused_by_name(bad: float) -> None:
    w = torch.zeros(2, 32)
    w[1, 3] = bad
    with pytest.raises(OptionError, match=r"layer\.weight"):
        quantize_rtn(w, spec(4, 32, False), "layer.weight")


weights = st.lists(
    st.floats(-(2.0**12), 2.0**12, width=32).filter(lambda v: v == 0 or abs(v) > 2.0**-9),
    min_size=1,
    max_size=24,
)


@given(weights, st.sampled_from([2, 3, 4, 5, 6, 7, 8]), st.booleans(), st.integers(1, 24))
def test_every_code_is_the_nearest_on_its_grid(
    values: list[float], bits: int, sym: bool, group: int
) -> None:
    w = torch.tensor([values])
    got = quantize_rtn(w, spec(bits, group, sym))
    scale = got.parts["scale"].float()
    grid = Grid(bits, sym)
    for g in range(scale.shape[1]):
        columns = slice(g * group, (g + 1) * group)
        zero = grid.middle if sym else int(got.parts["zero"][0, g])
        points = (torch.arange(grid.top + 1) - zero) * scale[0, g]
        best = (points[:, None] - w[0, columns]).abs().amin(0)
        found = (got.dequantize()[0, columns] - w[0, columns]).abs()
        assert torch.allclose(found, best, rtol=1e-5, atol=1e-5 * float(scale[0, g]))


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_the_closest_grid_is_never_farther(bits: int, sym: bool) -> None:
    generator = torch.Generator().manual_seed(bits)
    w = torch.randn(64, 32, generator=generator)
    w[:, 0] *= 4  # a value that stretches the plain grid
    grid = Grid(bits, sym)

    def error(scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        scale, zero = scale[:, None], zero[:, None]
        return (scale * (grid.encode(w, scale, zero) - zero) - w).square().sum(1)

    plain, closest = error(*grid.fit(w)), error(*grid.closest(w))
    assert bool((closest <= plain).all())
    assert closest.sum() < plain.sum() * (1.0 if bits < 8 else 1.0 + 1e-6)
    scale, zero = grid.closest(torch.zeros(2, 8))
    assert bool((scale > 0).all())
    assert torch.equal(zero, torch.full((2,), float(grid.middle)))
