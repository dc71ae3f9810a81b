"""Canonical nodes with a quantized weight become ops on handles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.programs import catalogue, check_golden, run, toy
from torch import fx

from qcompile import backends, ops
from qcompile.errors import LowerError
from qcompile.passes import CANONICALIZE, NAMES
from qcompile.passes.lower import Lower
from qcompile.passes.quantize.swap import SwapQuantized
from qcompile.program import Program, site_name
from qcompile.session import sites_of

PASSES = (*CANONICALIZE, SwapQuantized(catalogue()))


def up_to(name: str) -> tuple[Program, list[torch.Tensor]]:
    """The toy after the passes before ``name``."""
    program, inputs = toy()
    for rewrite in PASSES:
        if rewrite.name == name:
            break
        rewrite.run(program)
    return program, inputs


# The toy keeps every row: test_last_rows.py has a text for that pass.
@pytest.mark.parametrize(
    "rewrite",
    [rewrite for rewrite in PASSES if rewrite.name != "canonicalize.last_rows"],
    ids=lambda rewrite: rewrite.name,
)
def test_text_before_and_after(rewrite: Any) -> None:
    program, _ = up_to(rewrite.name)
    before = str(program)
    assert rewrite.run(program) > 0
    check_golden(rewrite.name, {"before": before, "after": str(program)})


@pytest.mark.parametrize("rewrite", PASSES, ids=lambda rewrite: rewrite.name)
def test_a_pass_keeps_the_meaning_and_runs_once(rewrite: Any) -> None:
    program, inputs = up_to(rewrite.name)
    expected = run(program, inputs)
    rewrite.run(program)
    program.check(rewrite.name)
    torch.testing.assert_close(run(program, inputs), expected, rtol=1e-6, atol=1e-6)
    assert rewrite.run(program) == 0


def test_every_pass_has_a_name_of_its_own() -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert [rewrite.name for rewrite in PASSES] == list(NAMES[: len(PASSES)])
    cpu: Any = backends.load("cpu")
    assert NAMES[len(PASSES) :] == (Lower.name, *(p.name for p in cpu.passes("fast")))


def test_no_weight_is_read_and_tied_uses_share_handles() -> None:
    program, _ = up_to("lower")
    handles = program.graph.find_nodes(op="get_attr")
    assert all(getattr(program.graph_module, str(node.target)).is_meta for node in handles)
    assert set(program.handles) == {"embed.weight", "first.weight", "second.weight"}
    sites = [(site.kind, site.weight.name) for site in sites_of(program)]
    assert sites == [
        ("embedding", "embed.weight"),
        ("linear", "first.weight"),
        ("linear", "second.weight"),
        ("linear", "embed.weight"),
    ]
    names = {str(node.target) for node in handles}
    assert len(names) == 9  # codes, scale and offset of three weights


def test_float_weights_and_unknown_ones_stay() -> None:
    program, _ = toy()
    for rewrite in CANONICALIZE:
        rewrite.run(program)
    known = catalogue()
    only = {name: known[name] for name in ("first.bias", "second.weight")}
    assert SwapQuantized(only).run(program) == 1
    assert len(program.nodes([torch.ops.aten.linear.default])) == 2


def test_check_names_a_lost_weight() -> None:
    program, _ = up_to("lower")
    del program.handles["second.weight"]
    with pytest.raises(LowerError, match=r"pass lower[\s\S]*'second\.weight'"):
        program.check("lower")


def test_names_that_differ_in_punctuation_get_buffers_of_their_own() -> None:
    program = Program(fx.GraphModule(torch.nn.Module(), fx.Graph()))
    names = ("p.q", "p_q", "p_q_", "p.q_", "p q")
    nodes = {name: program.constant(name, torch.zeros(1)) for name in names}
    assert len({str(node.target) for node in nodes.values()}) == len(names)
    again = program.constant("p.q", torch.ones(1))
    assert again.target == nodes["p.q"].target


def test_a_linear_under_autocast_computes_in_its_dtype() -> None:
    program, inputs = toy()
    for node in program.graph.nodes:
        value = node.meta.get("example_value")
        if node.op == "call_function" and node.target is not torch.nn.functional.embedding:
            node.meta["example_value"] = value.to(torch.bfloat16)
    for rewrite in PASSES:
        rewrite.run(program)
    first = program.nodes([ops.linear])[0]
    assert isinstance(first.args[0], fx.Node)
    assert first.args[0].target is torch.ops.aten.to.dtype
    assert run(program, inputs).dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("L['self'].model.layers[0].mlp", "model.layers.0.mlp"),
        ("L['self']._modules['model']._modules['layers']._modules['10'].q", "model.layers.10.q"),
        ("L['args'][0].model.embed_tokens", "model.embed_tokens"),
        ("L['fn'].proj", "proj"),
        ("L['self'][1].proj", "1.proj"),
        ("L['self']", "fallback"),
        ("model.layers.0.mlp", "model.layers.0.mlp"),
    ],
)
def test_paths_of_modules(path: str, name: str) -> None:
    node = fx.Graph().placeholder("x")
    node.meta["nn_module_stack"] = {"outer": ("L['self']", object), "inner": (path, object)}
    assert site_name(node, "fallback") == name
