"""GPTQ on one weight, against a plain column-by-column version, and on Hessians that break it."""

from __future__ import annotations

import pytest
import torch

from qcompile.errors import OptionError
from qcompile.quantizers.gptq import quantize_gptq, relative_loss
from qcompile.quantizers.rtn import quantize_rtn
from qcompile.spec import AffineForm, AffineSpec, GroupOrder

HALF = torch.float16


def problem(n: int, k: int, samples: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight and inputs whose columns are correlated and of very different size."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(k, k, generator=generator) / k**0.5
    x = torch.randn(samples, k, generator=generator) @ mix
    x = x * torch.rand(k, generator=generator).add(0.05) + 0.3 * x[:, :1]
    return torch.randn(n, k, generator=generator), x


def hessian_of(x: torch.Tensor) -> torch.Tensor:
    return x.t() @ x / len(x)


def spec(
    bits: int, group: int, form: AffineForm = "zero", order: GroupOrder = "sequential"
) -> AffineSpec:
    return AffineSpec(bits, group, form, HALF, order)


def plain_gptq(w: torch.Tensor, h: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Algorithm 1 without blocks, in float64, symmetric: the dequantized weight."""
    w, h = w.double().clone(), h.double().clone()
    h.diagonal().add_(0.01 * h.diagonal().mean())
    upper = torch.linalg.cholesky(torch.linalg.inv(h), upper=True)
    out = torch.empty_like(w)
    for column in range(w.shape[1]):
        if column % group == 0:
            most = w[:, column : column + group].abs().amax(1)
            scale = (2 * most / (2**bits - 1)).to(HALF).double()
        code = (torch.round(w[:, column] / scale) + 2 ** (bits - 1)).clamp(0, 2**bits - 1)
        out[:, column] = (code - 2 ** (bits - 1)) * scale
        error = (w[:, column] - out[:, column]) / upper[column, column]
        w[:, column:] -= error[:, None] * upper[column, column:]
    return out.float()


@pytest.mark.parametrize("group", [16, 48, 96, 128, 200, 256, 300])
def test_blocks_do_not_change_the_result(group: int) -> None:
    w, x = problem(16, 300, 2000)
    h = hessian_of(x)
    got = quantize_gptq(w, h, spec(4, group, "symmetric"))
    expected = plain_gptq(w, h, 4, group)
    # A value on the border of two codes may fall either way in float32, and moves those after it.
    same = (got.weight.dequantize() - expected).abs() <= 1e-5
    assert same.float().mean() > 0.99
    assert got.loss == pytest.approx(
        float(((x @ (w - expected).t()) ** 2).sum() / ((x @ w.t()) ** 2).sum()), rel=0.02
    )


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("form", ["symmetric", "zero"])
@pytest.mark.parametrize(("act_order", "static"), [(False, False), (True, False), (True, True)])
def test_it_loses_less_than_rounding(
    bits: int, form: AffineForm, act_order: bool, static: bool
) -> None:
    w, x = problem(48, 160, 1500)
    h = hessian_of(x)
    order: GroupOrder = "permuted" if act_order and not static else "sequential"
    got = quantize_gptq(
        w, h, spec(bits, 32, form, order), act_order=act_order, static_groups=static
    )
    rounded = quantize_rtn(w, spec(bits, 32, form))
    assert got.loss < 0.9 * relative_loss(w, rounded, h)
    assert got.loss == pytest.approx(relative_loss(w, got.weight, h), rel=1e-3)
    got.weight.check("gptq")


def test_act_order_gives_every_group_its_columns_by_size() -> None:
    w, x = problem(8, 100, 500)
    h = hessian_of(x)
    got = quantize_gptq(w, h, spec(4, 32, order="permuted"), act_order=True).weight
    index = got.parts["g_idx"]
    assert torch.bincount(index).tolist() == [32, 32, 32, 4]
    sizes = h.diagonal()
    assert sizes[index == 0].min() >= sizes[index == 1].max()
    assert sizes[index == 2].min() >= sizes[index == 3].max()


def test_static_groups_are_those_of_rounding() -> None:
    w, x = problem(8, 96, 500)
    got = quantize_gptq(w, hessian_of(x), spec(4, 32), act_order=True, static_groups=True).weight
    rounded = quantize_rtn(w, spec(4, 32))
    assert torch.equal(got.parts["scale"], rounded.parts["scale"])
    assert torch.equal(got.parts["zero"], rounded.parts["zero"])
    assert "g_idx" not in got.parts


@pytest.mark.parametrize("act_order", [False, True])
def test_few_samples_and_dead_columns(act_order: bool) -> None:
    w, x = problem(32, 256, 8)
    dead = torch.arange(10) * 25
    x[:, dead] = 0
    got = quantize_gptq(w, hessian_of(x), spec(4, 64, order="permuted"), act_order=act_order)
    values = got.weight.dequantize()
    assert torch.isfinite(values).all()
    assert 0 <= got.loss < 0.01
    # A dead column is rounded to nearest on its group's grid, not dropped.
    assert (values[:, dead] - w[:, dead]).abs().mean() < 0.25
    assert values[:, dead].abs().mean() > 0.5


def test_damping_is_raised_until_it_suffices() -> None:
    w, _ = problem(8, 64, 8)
    h = torch.eye(64) - 0.05 * torch.ones(64, 64)  # has a negative eigenvalue of -2.2
    got = quantize_gptq(w, h, spec(4, 32))
    assert got.damp > 2.2
    assert torch.isfinite(got.weight.dequantize()).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_inputs_that_are_not_finite_are_refused_by_name(bad: float) -> None:
    w, x = problem(8, 32, 64)
    h = hessian_of(x)
    h[3, 4] = bad
    with pytest.raises(OptionError, match=r"layer\.weight: received NaN or infinities"):
        quantize_gptq(w, h, spec(4, 32), name="layer.weight")


def test_the_arguments_are_left_alone() -> None:
    w, x = problem(8, 64, 100)
    h = hessian_of(x)
    before = w.clone(), h.clone()
    quantize_gptq(w, h, spec(4, 32, order="permuted"), act_order=True)
    assert torch.equal(w, before[0])
    assert torch.equal(h, before[1])
