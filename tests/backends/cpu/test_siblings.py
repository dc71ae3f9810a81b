"""Products of one input become one call, with the results of the single ones."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from support.weights import random_weight
from torch import fx
from torch.nn import functional

from qcompile import backends
from qcompile.backends.cpu.panel import NAME, arguments
from qcompile.backends.cpu.siblings import JoinSiblings
from qcompile.edge import find_route
from qcompile.layout import QuantizedTensor
from qcompile.program import Program
from qcompile.spec import AffineSpec, LookupSpec, ScaledSpec

backends.load("cpu").prepare()
OPS = torch.ops.qcompile_cpu
SPECS: tuple[AffineSpec | LookupSpec | ScaledSpec, ...] = (
    AffineSpec(4, 32, "offset"),
    AffineSpec(8, 32, "symmetric", torch.float16),
    LookupSpec(4, 16, tuple(range(-8, 8)), torch.float16),
    AffineSpec(5, 20, "zero"),
    ScaledSpec(torch.float8_e4m3fn, 32),
    AffineSpec(3, 4096, "symmetric"),
    # Of 140 columns both have two groups, and 144 with padding.
    AffineSpec(4, 80, "symmetric"),
    AffineSpec(4, 96, "symmetric"),
)


def packed(spec: AffineSpec | LookupSpec | ScaledSpec, n: int, k: int) -> QuantizedTensor:
    weight = random_weight(spec, n, k)
    route = find_route(weight.layout, weight.spec, NAME)
    assert route is not None
    return route.apply(weight)


@pytest.mark.parametrize("rows", [(1,), (2, 3), (0, 2), (40,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("digits", [0, 1])
def test_several_products_are_the_single_ones(
    rows: tuple[int, ...], dtype: torch.dtype, digits: int
) -> None:
    weights = [packed(spec, 17 + 16 * i, 140) for i, spec in enumerate(SPECS)]
    x = torch.randn(*rows, 140, dtype=dtype)
    biases = [torch.randn(w.shape[0]).to(dtype) if i % 2 else None for i, w in enumerate(weights)]
    parts = [w.parts[name] for w in weights for name in ("blob", "table")]
    shapes = [number for w in weights for number in arguments(w.spec, w.shape)]
    found = OPS.panel_linears(x, parts, biases, shapes, digits)
    for w, bias, y in zip(weights, biases, found, strict=True):
        call = (x, w.parts["blob"], w.parts["table"], bias, arguments(w.spec, w.shape), digits)
        assert torch.equal(y, OPS.panel_linear(*call))
    torch.library.opcheck(OPS.panel_linears.default, (x, parts, biases, shapes, digits))


def test_what_the_op_refuses() -> None:
    a, b = packed(SPECS[0], 32, 64), packed(SPECS[0], 32, 96)
    parts = [a.parts["blob"], a.parts["table"], b.parts["blob"], b.parts["table"]]
    shapes = [*arguments(a.spec, a.shape), *arguments(b.spec, b.shape)]
    with pytest.raises(RuntimeError, match="columns of the weight"):
        OPS.panel_linears(torch.ones(1, 64), parts, [None, None], shapes, 0)
    with pytest.raises(RuntimeError, match="six numbers"):
        OPS.panel_linears(torch.ones(1, 64), parts, [None], shapes, 0)


def program_of(late_bias: bool) -> tuple[Program, torch.Tensor]:
    """Three products of x, one of another input; the third has a bias."""
    program = Program(fx.GraphModule(torch.nn.Module(), fx.Graph()))
    graph = program.graph
    x = graph.placeholder("x")
    results = []
    for i, spec in enumerate(SPECS[:3]):
        w = packed(spec, 32, 64)
        parts = [program.constant(f"w{i}.{name}", part) for name, part in w.parts.items()]
        bias = program.constant("bias", torch.ones(32)) if i == 2 else None
        if late_bias and bias is not None:
            bias = graph.call_function(torch.neg, (bias,))
        call = (x, *parts, bias, arguments(w.spec, w.shape), 0)
        results.append(graph.call_function(OPS.panel_linear.default, call))
    other = graph.call_function(torch.cat, ((results[0], results[1]), -1))
    alone = packed(SPECS[0], 16, 64)
    parts = [program.constant(f"alone.{name}", part) for name, part in alone.parts.items()]
    call = (other, *parts, None, arguments(alone.spec, alone.shape), 0)
    results.append(graph.call_function(OPS.panel_linear.default, call))
    graph.output(tuple(results))
    program.graph_module.recompile()
    return program, torch.randn(3, 64)


@pytest.mark.parametrize("late_bias", [False, True])
def test_siblings_are_joined(late_bias: bool) -> None:
    program, x = program_of(late_bias)
    expected = program.graph_module(x)
    assert JoinSiblings().run(program) == (2 if late_bias else 3)
    program.check("siblings")
    program.graph_module.recompile()
    assert len(program.nodes([OPS.panel_linears.default])) == 1
    for found, wanted in zip(program.graph_module(x), expected, strict=True):
        assert torch.equal(found, wanted)
    assert JoinSiblings().run(program) == 0


WRITES: dict[str, Callable[[fx.Graph, fx.Node], object]] = {
    "method": lambda graph, x: graph.call_method("add_", (x, 1)),
    "operator": lambda graph, x: graph.call_function(operator.imul, (x, 2)),
    "item": lambda graph, x: graph.call_function(operator.setitem, (x, 0, 5.0)),
    "view": lambda graph, x: graph.call_method("mul_", (graph.call_method("view", (x, -1)), 2)),
    "name": lambda graph, x: graph.call_function(torch.relu_, (x,)),
    "flag": lambda graph, x: graph.call_function(functional.relu, (x,), {"inplace": True}),
    "place": lambda graph, x: graph.call_function(functional.elu, (x, 2.0, True)),
    "out": lambda graph, x: graph.call_function(torch.add, (x, 1), {"out": x}),
    "overload": lambda graph, x: graph.call_function(torch.ops.aten.add_.Tensor, (x, 1)),
    "packet": lambda graph, x: graph.call_function(torch.ops.aten.zero_, (x,)),
    "list": lambda graph, x: graph.call_function(torch._foreach_add_, ([x], 1)),
}


@pytest.mark.parametrize("kind", [*WRITES, "none"])
def test_a_write_between_products_keeps_them_apart(kind: str) -> None:
    program = Program(fx.GraphModule(torch.nn.Module(), fx.Graph()))
    graph = program.graph
    x = graph.call_function(torch.add, (graph.placeholder("x"), 0))
    results = []
    for i in range(2):
        w = packed(SPECS[0], 32, 64)
        parts = [program.constant(f"w{i}.{name}", part) for name, part in w.parts.items()]
        call = (x, *parts, None, arguments(w.spec, w.shape), 0)
        results.append(graph.call_function(OPS.panel_linear.default, call))
        if i == 0 and kind in WRITES:
            WRITES[kind](graph, x)
        if i == 0:  # these write nothing
            graph.call_function(operator.and_, (True, False))
            graph.call_function(functional.relu, (x, False))
    graph.output(tuple(results))
    program.graph_module.recompile()
    given = torch.randn(3, 64)
    expected = program.graph_module(given)
    assert JoinSiblings().run(program) == (2 if kind == "none" else 0)
    program.graph_module.recompile()
    for found, wanted in zip(program.graph_module(given), expected, strict=True):
        assert torch.equal(found, wanted)
