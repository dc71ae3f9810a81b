"""Conv1D modules become linears without a copy, and come back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from qcompile.conv1d import exchange_conv1d

conv1d: Any = pytest.importorskip("transformers.pytorch_utils").Conv1D


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = conv1d(288, 96), nn.Linear(288, 4)
        self.again = self.first


def test_values_names_and_results_stay() -> None:
    model: Any = Pair()
    before, names = model.first, list(model.state_dict())
    x = torch.randn(2, 3, 96)
    expected = before(x)
    done = exchange_conv1d(model)
    assert type(model.first) is nn.Linear
    assert model.again is model.first
    assert model.first.weight.shape == (288, 96)
    assert model.first.weight.data_ptr() == before.weight.data_ptr()
    assert model.first.bias is before.bias
    assert torch.allclose(model.first(x), expected, atol=1e-6)
    assert list(model.state_dict()) == names
    for exchange in done:
        exchange.undo()
    assert model.first is before
    assert model.again is before


def test_only_the_named_ones() -> None:
    model: Any = nn.ModuleDict({"a": conv1d(8, 4), "b": conv1d(8, 4)})
    exchange_conv1d(model, ["b"])
    assert type(model["a"]) is conv1d
    assert type(model["b"]) is nn.Linear
