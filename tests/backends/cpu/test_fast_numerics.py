"""The numerics ``fast``: chosen only where asked for, said in the plan, measured by ``verify``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.weights import random_weight, reference
from support.zoo import relative_l2, zoo_entry

import qcompile
from qcompile.backends.cpu.experts import EXACT, FAST
from qcompile.errors import OptionError
from qcompile.experts_layout import stack_experts
from qcompile.kernel import Accept, Reject
from qcompile.site import ExpertsSite
from qcompile.spec import AffineSpec, ScaledSpec
from qcompile.target import Target


def test_a_model_in_fast_numerics() -> None:
    entry = zoo_entry("gguf-q2_k", "gguf", "dense")
    model: Any = qcompile.load(entry.path, emitter="eager", verify=True, numerics="fast")[0]
    plan = model.qcompile.plan
    linears = [e for e in plan.entries if e.site.kind == "linear"]
    assert {e.kernel.name for e in linears if e.kernel} == {"cpu.panel_linear_int8"}
    assert "numerics fast" in str(plan)
    assert plan.to_json().count('"cpu.panel_linear_int8"') >= len(linears)
    worst = {e.kernel: e.relative_l2 for e in reversed(model.qcompile.verification)}
    assert 1e-3 < worst["cpu.panel_linear_int8"] < 2e-2
    ids = torch.tensor([entry.sequences["128"]])
    expected = torch.from_numpy(entry.references["exact_logits_128"])
    assert 1e-4 < relative_l2(model(ids).logits[0, -16:], expected) < 3e-2


def test_exact_is_the_default() -> None:
    entry = zoo_entry("gguf-q2_k", "gguf", "dense")
    plan = qcompile.plan(entry.path)
    assert plan.numerics == "exact"
    assert not any("int8" in e.kernel.name for e in plan.entries if e.kernel)


def test_what_is_refused() -> None:
    entry = zoo_entry("gguf-q2_k", "gguf", "dense")
    with pytest.raises(OptionError, match="quick"):
        qcompile.plan(entry.path, numerics="quick")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="npu has no such kernels"):
        qcompile.plan(entry.path, device="npu:910b", numerics="fast")


def test_experts_of_narrow_floats_are_not_called_fast() -> None:
    """Their activations stay floats, so the plan may not say that they are rounded."""
    target = Target("cpu", "avx2")
    for narrow, roles in ((False, "up"), (True, "up"), (True, "down")):
        four = AffineSpec(4, 32, "offset")
        specs = dict.fromkeys(("up", "down"), four) | (
            {roles: ScaledSpec(torch.float8_e4m3fn, 32)} if narrow else {}
        )
        weights = {
            name: [reference(random_weight(spec, 32, 32))] * 2 for name, spec in specs.items()
        }
        site = ExpertsSite("layer", stack_experts("layer", weights, "here"))  # type: ignore[arg-type]
        answer = FAST.accepts(site, target)
        assert isinstance(answer, Reject if narrow else Accept)
        if isinstance(answer, Reject):
            assert answer.reason.startswith(f"{roles}: narrow floats")
        assert isinstance(EXACT.accepts(site, target), Accept)
