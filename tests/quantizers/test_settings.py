"""Options of the quantizers that mean nothing are refused before the model is touched."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

import qcompile
from qcompile.errors import OptionError

DATA = [torch.zeros(4, 64)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"scheme": "rtn", "bits": "4"}, "bits='4': a str\n  needed  one of 2, 3, 4"),
        ({"scheme": "rtn", "bits": 1}, "bits=1: not supported\n  needed  one of 2, 3, 4"),
        ({"scheme": "gptq", "bits": 9}, "bits=9"),
        ({"scheme": "rtn", "bits": True}, "bits=True: a bool"),
        ({"scheme": "rtn", "bits": 4.0}, "bits=4.0: a float"),
        ({"scheme": "gptqq"}, "one of rtn, gptq.*\n.*did you mean 'gptq'"),
        ({"scheme": "gptqq", "bits": 4}, "did you mean 'gptq'"),
        ({"bits": 4}, "scheme='auto': quantizes no float model"),
        ({"scheme": "rtn", "group_size": 0}, "group_size=0"),
        ({"scheme": "rtn", "group_size": -2}, "group_size=-2"),
        ({"scheme": "rtn", "group_size": "128"}, "group_size='128': a str"),
        ({"scheme": "rtn", "sym": 1}, "sym=1: a int"),
        ({"scheme": "rtn", "calibration": DATA}, "calibration=: has no meaning"),
        ({"scheme": "rtn", "desc_act": True}, "desc_act=: has no meaning"),
        ({"scheme": "gptq", "desc_act": True}, "desc_act=: has no meaning with no calibration"),
        ({"scheme": "gptq", "static_groups": True}, "static_groups=: has no meaning with no"),
        ({"scheme": "gptq", "calibration": []}, "no batch in it"),
        ({"scheme": "gptq", "calibration": "text"}, "a str"),
        ({"scheme": "gptq", "calibration": ["text"]}, "tokenize the texts"),
        ({"scheme": "gptq", "calibration": DATA, "damp": 0}, "damp=0"),
        ({"scheme": "gptq", "calibration": DATA, "damp": 1.5}, "damp=1.5"),
        ({"scheme": "rtn", "skip": "0"}, r"pass skip=\['0'\]"),
        ({"scheme": "rtn", "skip": ["("]}, "no regular expression"),
        ({"scheme": "rtn", "skip": [3]}, "no regular expression"),
        ({"scheme": "rtn", "skip": ["nothing"]}, "matches no linear in full"),
        ({"scheme": "rtn", "skip": [".*"]}, "no linear to quantize"),
        ({"scheme": "rtn", "keep": ["nothing"]}, "matches no parameter"),
        ({"scheme": "rtn", "lm_head": True}, "no output head"),
        ({"scheme": "rtn", "group": 32}, "did you mean 'group_size'"),
        ({"scheme": "rtn", "progress": "barr"}, "progress='barr'"),
        ({"scheme": "rtn", "device": "cdua"}, "did you mean 'cuda'"),
        ({"scheme": "rtn", "emitter": "inducter"}, "did you mean 'inductor'"),
        ({"scheme": "gguf"}, "checkpoint=None"),
    ],
)
def test_an_option_without_meaning(given: dict[str, Any], message: str) -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 16))
    before = [(p, p.clone()) for p in model.parameters()]
    begin = time.perf_counter()
    with pytest.raises(OptionError, match=message):
        qcompile.optimize(model, **given)
    assert time.perf_counter() - begin < 1
    for now, (parameter, values) in zip(model.parameters(), before, strict=True):
        assert now is parameter
        assert torch.equal(now, values)


def test_options_of_quantizers_beside_a_checkpoint() -> None:
    with pytest.raises(OptionError, match="bits=: has no meaning with scheme='auto' and a ch"):
        qcompile.optimize(nn.Linear(64, 32), checkpoint="model.gguf", bits=4)


def test_parameters_without_values() -> None:
    with pytest.raises(OptionError, match="on the meta device"):
        qcompile.optimize(nn.Sequential(nn.Linear(64, 32, device="meta")), scheme="rtn")


def test_parameters_that_are_no_usual_floats() -> None:
    model = nn.Sequential(nn.Linear(64, 32, dtype=torch.float64))
    with pytest.raises(OptionError, match=r"0\.weight: has dtype torch.float64"):
        qcompile.optimize(model, scheme="rtn")
