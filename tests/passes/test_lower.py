"""Canonical ops become kernel calls on packed parts."""

from __future__ import annotations

import pytest
import torch
from support.programs import catalogue, check_golden, run, toy

from qcompile import backends, ops
from qcompile.backends.reference import KERNELS
from qcompile.errors import LowerError
from qcompile.kernel import Kernel
from qcompile.layout import QuantizedTensor
from qcompile.leftovers import _refuse_handles
from qcompile.passes import CANONICALIZE
from qcompile.passes.lower import Lower
from qcompile.passes.quantize.swap import SwapQuantized
from qcompile.passes.select import Policy, select
from qcompile.passes.weights.pack import pack
from qcompile.plans import Entry
from qcompile.program import Program
from qcompile.session import sites_of
from qcompile.site import key_of
from qcompile.spec import FloatSpec
from qcompile.target import Target


def swapped() -> tuple[Program, list[torch.Tensor]]:
    program, inputs = toy()
    for rewrite in (*CANONICALIZE, SwapQuantized(catalogue())):
        rewrite.run(program)
    return program, inputs


def packed(entry: Entry) -> QuantizedTensor:
    if entry.route is None:
        data = entry.site.weight.dequantize()
        return QuantizedTensor(FloatSpec(data.dtype), "float", entry.site.weight.shape, {"d": data})
    return pack(entry.site.weight, entry.route)


def lower(program: Program, kernels: tuple[Kernel, ...], policy: Policy = "error") -> Lower:
    entries = select(sites_of(program), kernels, Target("cpu", "generic"), policy)
    return Lower({key_of(e.site): e for e in entries}, packed)


def test_text_before_and_after() -> None:
    program, _ = swapped()
    before = str(program)
    assert lower(program, KERNELS).run(program) == 4
    check_golden("lower", {"before": before, "after": str(program)})


@pytest.mark.parametrize("kernels", ["reference", "cpu", "none"])
def test_the_meaning_is_kept(kernels: str) -> None:
    program, inputs = swapped()
    expected = run(program, inputs)
    backend = backends.load("cpu")
    backend.prepare()
    chosen = {"reference": KERNELS, "cpu": backend.KERNELS, "none": ()}[kernels]
    rewrite = lower(program, chosen, "dequantize")
    assert rewrite.run(program) == 4
    program.check("lower")
    assert float((run(program, inputs) - expected).norm() / expected.norm()) <= 2e-6
    left = program.graph.find_nodes(op="get_attr")
    assert not any(getattr(program.graph_module, str(node.target)).is_meta for node in left)
    assert {str(node.target) for node in left} == set(program.packed)
    assert set(dict(program.graph_module.named_buffers())) == set(program.packed)


def test_a_tied_weight_is_one_buffer() -> None:
    program, _ = swapped()
    lower(program, KERNELS).run(program)
    assert len(program.packed) == 9  # codes, scale and offset of three weights, four sites


def test_an_op_that_was_not_planned_is_named() -> None:
    program, _ = swapped()
    rewrite = lower(program, KERNELS)
    short = {key: e for key, e in rewrite.entries.items() if key[1] != "second.weight"}
    with pytest.raises(LowerError, match=r"linear[\s\S]*'second\.weight'"):
        Lower(short, packed).run(program)


def test_a_graph_that_was_not_lowered_is_refused() -> None:
    program, _ = swapped()
    with pytest.raises(LowerError, match=r"was not lowered[\s\S]*QCOMPILE_SKIP"):
        _refuse_handles(program)
    lower(program, KERNELS).run(program)
    _refuse_handles(program)
    assert program.nodes([ops.linear])  # the reference kernels are the canonical ops themselves
