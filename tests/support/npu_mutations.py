"""Wrong emissions: what a kernel could put into a graph, and what tells that it is wrong.

Comes in: a right graph of a kernel's calls. Goes out: the same graph with one mistake in it.
Always holds: a mistake changes one argument of one call, as a kernel with that mistake would.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from qcompile.backends import npu
from qcompile.edge import find_route
from qcompile.spec import AffineSpec
from support.lowered import emulated_call
from support.npu_experts import HALF, case, documented, kernel, layer, lowered, packed_for
from support.weights import random_weight

_ATEN = torch.ops.aten


FOUR = AffineSpec(4, 32, "zero", HALF)


def right_graph(kind: str) -> tuple[fx.GraphModule, torch.Tensor, torch.Tensor, float]:
    """A kernel's graph, an input, the result that is due, and how far it may be off."""
    torch.manual_seed(0)
    if kind == "experts":
        weight, given = layer(FOUR, FOUR), case(HALF, 9)
        graph = lowered(HALF, packed_for(HALF, weight), given)
        bound = kernel(HALF).tolerance.relative_l2
        return graph, given["x"], documented(weight, given), bound
    name = "npu.linear_int4" if kind == "plain" else "npu.linear_int4_t"
    made = next(k for k in npu.kernels(HALF) if k.name == name)
    stored, x = random_weight(FOUR, 48, 96), torch.randn(5, 96).half()
    assert made.layout is not None
    route = find_route(stored.layout, stored.spec, made.layout)
    assert route is not None
    graph = emulated_call(made, route.apply(stored), None, x)
    expected = x.double() @ stored.dequantize().double().T
    return graph, x, expected, made.tolerance.relative_l2


@dataclass(frozen=True)
class Mutation:
    """A mistake.

    Attributes:
        kind: ``plain`` or ``turned`` for a product with ``[K, N]`` or with ``[N, K]``, ``experts``.
        apply: makes the mistake.
        says: what refuses the call; None where only the result shows it.
    """

    kind: str
    apply: Callable[[fx.GraphModule], None]
    says: str | None


def _call(graph: fx.GraphModule, name: str) -> fx.Node:
    """The first call of a vendor's operator in a graph."""
    wanted = f"npu.npu_{name}.default"
    [node, *_] = [n for n in graph.graph.nodes if str(n.target) == wanted]
    assert isinstance(node, fx.Node)
    return node


def _product(graph: fx.GraphModule) -> fx.Node:
    return _call(graph, "weight_quant_batchmatmul")


def _wrapped(graph: fx.GraphModule, place: int, *call: Any) -> None:
    """Put an operator before an argument of the product."""
    node = _product(graph)
    with graph.graph.inserting_before(node):
        new = graph.graph.call_function(call[0], (node.args[place], *call[1:]))
    node.update_arg(place, new)


def _argument(place: int, value: Any) -> Callable[[fx.GraphModule], None]:
    return lambda graph: _product(graph).update_arg(place, value)


def _before(place: int, *call: Any) -> Callable[[fx.GraphModule], None]:
    return lambda graph: _wrapped(graph, place, *call)


def _negated(graph: fx.GraphModule) -> None:
    """The offset as it lies in memory."""
    part = _product(graph).args[3]
    assert isinstance(part, fx.Node)
    while part.op != "get_attr":
        [part] = part.all_input_nodes
    with graph.graph.inserting_after(part):
        new = graph.graph.call_function(_ATEN.mul.Tensor, (part, -1.0))
    part.replace_all_uses_with(new)
    new.update_arg(0, part)


def _named(call: str, name: str, value: Any) -> Callable[[fx.GraphModule], None]:
    return lambda graph: _call(graph, call).update_kwarg(name, value)


def _untransposed(place: int) -> Callable[[fx.GraphModule], None]:
    """Of the same shape, but contiguous."""
    return lambda graph: _wrapped(graph, place, _ATEN.contiguous.default)


MUTATIONS: dict[str, Mutation] = {
    "sign of the offset": Mutation("plain", _negated, None),
    "sign of the offset, transposed": Mutation("turned", _negated, None),
    "shape of the offset": Mutation(
        "plain", _before(3, _ATEN.slice.Tensor, 0, 0, 1), "dtype and the shape of scale"
    ),
    "a group that is no multiple of 32": Mutation("plain", _argument(7, 48), "multiple of 32"),
    "a group of K": Mutation("plain", _argument(7, 96), "multiple of 32"),
    "three dimensions": Mutation("plain", _before(0, _ATEN.unsqueeze.default, 0), "two dimensions"),
    "contiguous scales beside a transposed weight": Mutation(
        "turned", _untransposed(2), "transposed exactly when weight is"
    ),
    "a contiguous offset beside a transposed weight": Mutation(
        "turned", _untransposed(3), "transposed exactly when weight is"
    ),
    "no offset in a grouped product": Mutation(
        "experts", _named("grouped_matmul", "antiquant_offset", None), "antiquant_offset is missing"
    ),
    "running sums for counts": Mutation(
        "experts", _named("grouped_matmul", "group_list_type", 0), "name every row|rows of"
    ),
    "no group type": Mutation(
        "experts", _named("grouped_matmul", "group_type", None), "group_type"
    ),
    "the other mode of finalize": Mutation(
        "experts", _named("moe_finalize_routing", "drop_pad_mode", 0), "need drop_pad_mode 2"
    ),
}
