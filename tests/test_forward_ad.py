"""Forward-mode derivatives of a compiled module are refused: they would be missing."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import qcompile
from qcompile.errors import OptionError


def test_tangents() -> None:
    torch._dynamo.reset()
    model = qcompile.optimize(nn.Sequential(nn.Linear(64, 32)), scheme="rtn", emitter="eager")
    x = torch.randn(2, 64)
    expected = model(x)
    with forward_ad.dual_level():
        assert torch.equal(model(x), expected)  # no tangent, nothing to lose
        with pytest.raises(OptionError, match="carries a tangent"):
            model(forward_ad.make_dual(x, torch.randn(2, 64)))
    assert torch.equal(model(x), expected)
