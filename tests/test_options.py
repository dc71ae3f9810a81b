"""Arguments that mean nothing are refused by name, before anything is done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.small import write_module
from torch import nn

import qcompile
from qcompile.errors import OptionError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    return write_module(tmp_path / "m.gguf", nn.Sequential(nn.Linear(64, 32)), {}, "Q8_0")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dtype": torch.int8}, "dtype=torch.int8"),
        ({"dtype": torch.float64}, "dtype=torch.float64"),
        ({"dtype": "float32"}, "dtype='float32'"),
        ({"keep": ["("]}, "no regular expression"),
        ({"keep": "0.bias"}, r"pass \['0.bias'\]"),
        ({"keep": ["nothing"]}, "matches no parameter"),
        ({"keep": 3}, "keep=3: a int"),
        ({"device": torch.device("cpu")}, "a device"),
        ({"checkpoint": 3}, "checkpoint=3"),
        ({"checkpoint": None}, "checkpoint=None"),
        ({"on_unsupported": "errror"}, "did you mean 'error'"),
        ({"emitter": "inducter"}, "did you mean 'inductor'"),
        ({"scheme": "ggfu"}, "did you mean 'gguf'"),
    ],
)
def test_an_argument_without_meaning(file: Path, given: dict[str, Any], message: str) -> None:
    model = nn.Sequential(nn.Linear(64, 32))
    before = model[0].weight
    with pytest.raises(OptionError, match=message):
        qcompile.optimize(model, **({"checkpoint": file} | given))
    assert model[0].weight is before


def test_a_model_that_is_no_module(file: Path) -> None:
    with pytest.raises(OptionError, match="a str"):
        qcompile.optimize("model", checkpoint=file)  # type: ignore[type-var]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"numerics": "loose"}, "numerics='loose'"),
        ({"numerics": "fast", "device": "npu:910b"}, "no such kernels"),
        ({"keep": "x"}, "one text"),
        ({"keep": None}, "a NoneType"),
        ({"keep": [3]}, "a int"),
        ({"keep": ["("]}, "no regular expression"),
    ],
)
def test_settings_of_transformers_without_meaning(given: dict[str, Any], message: str) -> None:
    """Before anything is loaded."""
    with pytest.raises(OptionError, match=message):
        qcompile.HFConfig(**given)
