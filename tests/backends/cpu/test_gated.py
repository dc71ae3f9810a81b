"""A gated layer as one call: the results of its products and of the function between them."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable

import pytest
import torch
from support.weights import random_weight
from torch import fx
from torch.nn import functional

from qcompile import backends
from qcompile.backends.cpu.gated import GateProducts
from qcompile.backends.cpu.panel import NAME, arguments
from qcompile.edge import find_route
from qcompile.layout import QuantizedTensor
from qcompile.program import Program
from qcompile.spec import AffineSpec, ScaledSpec

backends.load("cpu").prepare()
OPS = torch.ops.qcompile_cpu
FUNCTIONS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    functional.silu,
    # As torch has it, without the difference of nearly equal numbers.
    lambda x: x * torch.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)),
)
# Their groups differ where digits of one cannot serve the other.
PAIRS = (
    (AffineSpec(4, 32, "offset"), AffineSpec(4, 32, "offset")),
    (AffineSpec(5, 20, "zero"), AffineSpec(4, 32, "symmetric", torch.float16)),
    (AffineSpec(4, 96, "symmetric"), ScaledSpec(torch.float8_e4m3fn, 32)),
)


def packed(spec: AffineSpec | ScaledSpec, n: int, k: int) -> QuantizedTensor:
    weight = random_weight(spec, n, k)
    route = find_route(weight.layout, weight.spec, NAME)
    assert route is not None
    return route.apply(weight)


def call_of(
    x: torch.Tensor, pair: int, n: int, biased: bool, function: int, digits: int
) -> tuple[tuple[object, ...], list[torch.Tensor]]:
    """The arguments of the op, and the two products by ops of their own."""
    weights = [packed(spec, n, x.shape[-1]) for spec in PAIRS[pair]]
    biases = [torch.randn(n).to(x.dtype) if biased else None for _ in weights]
    parts = [w.parts[name] for w in weights for name in ("blob", "table")]
    shapes = [number for w in weights for number in arguments(w.spec, w.shape)]
    products = [
        OPS.panel_linear(
            x, w.parts["blob"], w.parts["table"], bias, arguments(w.spec, w.shape), digits
        )
        for w, bias in zip(weights, biases, strict=True)
    ]
    return (x, parts, biases, shapes, function, digits), products


# 700 rows are taken in two parts; 600 x 2000 x 700 operations are shared out in pieces.
@pytest.mark.parametrize(
    ("rows", "n", "k"),
    [((1,), 17, 140), ((2, 3), 100, 140), ((0, 2), 32, 64), ((70,), 300, 140), ((700,), 2005, 600)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("digits", [0, 1])
@pytest.mark.parametrize("function", [0, 1])
def test_the_op_is_its_parts(
    rows: tuple[int, ...], n: int, k: int, dtype: torch.dtype, digits: int, function: int
) -> None:
    torch.manual_seed(0)
    x = torch.randn(*rows, k, dtype=dtype)
    for pair in range(len(PAIRS) if n < 1000 else 1):
        call, (gate, up) = call_of(x, pair, n, n != 100, function, digits)
        found = OPS.panel_gated(*call)
        expected = (FUNCTIONS[function](gate.double()) * up.double()).to(dtype)
        assert found.shape == (*rows, n)
        # One rounding to the dtype, which a few in float32 can turn: far below zero gelu is an
        # exponential of a large number, which they move by parts of a millionth.
        step = max(torch.finfo(dtype).eps, 4e-7 if function == 0 else 1e-5)
        torch.testing.assert_close(found, expected, rtol=step, atol=1e-30)


def test_the_op_has_a_shape() -> None:
    call, _ = call_of(torch.randn(3, 140), 0, 33, True, 0, 1)
    torch.library.opcheck(OPS.panel_gated.default, call)


def test_far_ends_of_the_functions() -> None:
    x = torch.zeros(6, 64)
    x[:, 0] = torch.tensor([-3e4, -200.0, -20.0, 20.0, 200.0, float("nan")])
    weight = packed(AffineSpec(8, 32, "symmetric"), 16, 64)
    blob, table = weight.parts["blob"], weight.parts["table"]
    shape = arguments(weight.spec, weight.shape)
    up = OPS.panel_linear(x, blob, table, None, shape, 0)
    gelu = functools.partial(functional.gelu, approximate="tanh")
    plain_functions: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (functional.silu, gelu)
    for function, plain in enumerate(plain_functions):
        call = (x, [blob, table] * 2, [None, None], shape * 2, function, 0)
        expected = plain(up.double()) * up.double()
        torch.testing.assert_close(
            OPS.panel_gated(*call).double(), expected, rtol=1e-5, atol=1e-6, equal_nan=True
        )


def test_what_the_op_refuses() -> None:
    call, _ = call_of(torch.randn(3, 140), 0, 33, True, 0, 1)
    x, parts, biases, shapes, function, digits = call
    with pytest.raises(RuntimeError, match="two weights"):
        OPS.panel_gated(x, parts[:2], biases, shapes, function, digits)  # type: ignore[index]
    with pytest.raises(RuntimeError, match="unknown function"):
        OPS.panel_gated(x, parts, biases, shapes, 2, digits)
    with pytest.raises(RuntimeError, match="do not fit"):
        OPS.panel_gated(torch.ones(1, 141), parts, biases, shapes, function, digits)


Build = Callable[[fx.Graph, fx.Node, fx.Node], fx.Node]


def _times(graph: fx.Graph, gate: fx.Node, up: fx.Node) -> fx.Node:
    return graph.call_function(operator.mul, (gate, up))


def _tanh(graph: fx.Graph, x: fx.Node) -> fx.Node:
    return graph.call_function(functional.gelu, (x,), {"approximate": "tanh"})


def _silu(graph: fx.Graph, x: fx.Node, inplace: bool = False) -> fx.Node:
    return graph.call_function(functional.silu, (x,), {"inplace": inplace})


def _read_again(graph: fx.Graph, first: fx.Node, second: fx.Node) -> fx.Node:
    gate = _silu(graph, first)
    return graph.call_function(operator.add, (_times(graph, gate, second), gate))


def _written(graph: fx.Graph, first: fx.Node, second: fx.Node) -> fx.Node:
    graph.call_method("add_", (first.args[0], 1))
    return _times(graph, _silu(graph, first), second)


GRAPHS: dict[str, tuple[int, Build]] = {
    "silu": (1, lambda graph, a, b: _times(graph, _silu(graph, a), b)),
    "turned around": (
        1,
        lambda graph, a, b: graph.call_function(torch.mul, (b, _silu(graph, a))),
    ),
    "gelu": (1, lambda graph, a, b: _times(graph, _tanh(graph, a), b)),
    "another gelu": (
        0,
        lambda graph, a, b: _times(graph, graph.call_function(functional.gelu, (a,)), b),
    ),
    "in place": (0, lambda graph, a, b: _times(graph, _silu(graph, a, inplace=True), b)),
    "squared": (0, lambda graph, a, b: _times(graph, _silu(graph, a), a)),
    "read again": (0, _read_again),
    "x written": (0, _written),
}


@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize("rows", [None, 8, 9])
def test_layers_are_found(kind: str, rows: int | None) -> None:
    joined, build = GRAPHS[kind]
    joined = 0 if rows == 8 else joined
    program = Program(fx.GraphModule(torch.nn.Module(), fx.Graph()))
    graph = program.graph
    x = graph.call_function(torch.add, (graph.placeholder("x"), 0))
    if rows is not None:
        x.meta["example_value"] = torch.empty(1, rows, 64, device="meta")
    products = []
    for i in range(2):
        w = packed(PAIRS[0][0], 32, 64)
        parts = [program.constant(f"w{i}.{name}", part) for name, part in w.parts.items()]
        call = (x, *parts, None, arguments(w.spec, w.shape), 0)
        products.append(graph.call_function(OPS.panel_linear.default, call))
    graph.output(build(graph, *products))
    program.graph_module.recompile()
    given = torch.randn(3, 64)
    expected = program.graph_module(given)
    assert GateProducts().run(program) == joined
    program.check("gated")
    program.graph_module.recompile()
    assert len(program.nodes([OPS.panel_gated.default])) == joined
    torch.testing.assert_close(program.graph_module(given), expected, rtol=2e-6, atol=1e-6)
    assert GateProducts().run(program) == 0
