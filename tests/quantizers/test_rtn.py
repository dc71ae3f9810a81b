"""Rounding whole weights: groups that do not divide, whole rows, many rows."""

from __future__ import annotations

import pytest
import torch

from qcompile.quantizers import rtn
from qcompile.quantizers.rtn import quantize_rtn
from qcompile.quantizers.settings import settings_for
from qcompile.spec import AffineSpec


def test_a_ragged_last_group_is_a_group_of_its_own() -> None:
    torch.manual_seed(0)
    w = torch.randn(64, 192)
    got = quantize_rtn(w, AffineSpec(4, 128, "zero", torch.float16))
    got.check("ragged")
    assert got.parts["scale"].shape == (64, 2)
    tail = quantize_rtn(w[:, 128:], AffineSpec(4, 64, "zero", torch.float16))
    assert torch.equal(got.dequantize()[:, 128:], tail.dequantize())


@pytest.mark.parametrize("size", [-1, 192, 500])
def test_one_group_a_row(size: int) -> None:
    spec = settings_for("rtn", {"group_size": size}).spec(192)
    assert spec.group == 192
    assert spec.order == "sequential"


def test_runs_of_rows_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    w = torch.randn(37, 48, generator=torch.Generator().manual_seed(0))
    spec = AffineSpec(3, 16, "symmetric", torch.float16)
    whole = quantize_rtn(w, spec)
    monkeypatch.setattr(rtn, "_VALUES_AT_ONCE", 100)
    pieces = quantize_rtn(w, spec)
    assert torch.equal(whole.dequantize(), pieces.dequantize())


def test_half_precision_weights_are_rounded_in_float32() -> None:
    w = torch.randn(8, 32, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    spec = AffineSpec(8, 32, "zero", torch.float16)
    assert torch.equal(
        quantize_rtn(w, spec).dequantize(), quantize_rtn(w.float(), spec).dequantize()
    )
