"""Let a lowered graph take named inputs alone, and hold everything else itself.

Before: ``f(s0, w, cache, ids)`` with a size, a parameter and two named inputs.
After: ``f(cache, ids)``; the size is read off ``ids``, the parameter is a constant of the graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from qcompile.errors import CaptureError

Bound = tuple[fx.GraphModule, tuple[torch.Tensor, ...], tuple[str, ...]]


def bind_inputs(
    graph_module: fx.GraphModule, values: Mapping[fx.Node, Any], names: Mapping[int, str]
) -> Bound:
    """A copy of a graph that takes named tensors only.

    Args:
        graph_module: a lowered graph as dynamo traced it.
        values: what its placeholders were traced with.
        names: of inputs, by identity of those values.

    Returns:
        the copy, a fake tensor and the name of each of its placeholders.

    Raises:
        CaptureError: an input is neither a tensor nor the size of one.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(graph_module.graph, copies))
    named: dict[fx.Node, str] = {}
    others: list[fx.Node] = []
    held: dict[str, torch.Tensor] = {}
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for original in graph_module.graph.find_nodes(op="placeholder"):
        node, value = copies[original], values[original]
        if id(value) in names:
            named[node] = names[id(value)]
        elif isinstance(value, torch.Tensor):
            with graph.inserting_before(first):
                constant = graph.get_attr(f"held_{len(held)}")
            held[str(constant.target)] = value.detach().contiguous()
            _replace(node, constant)
        else:
            others.append(node)
    for node in others:
        with graph.inserting_before(first):
            _replace(node, _size(graph, node, named))
    constants = {str(node.target) for node in graph.find_nodes(op="get_attr")} - set(held)
    module = fx.GraphModule({**{n: getattr(graph_module, n) for n in constants}, **held}, graph)
    kept = module.graph.find_nodes(op="placeholder")
    return (
        module,
        tuple(node.meta["example_value"] for node in kept),
        tuple(named[node] for node in kept),
    )


def _replace(node: fx.Node, new: fx.Node) -> None:
    new.meta["example_value"] = node.meta["example_value"]
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def _size(graph: fx.Graph, node: fx.Node, named: Mapping[fx.Node, str]) -> fx.Node:
    """A node that reads a size off an input that has it."""
    symbol = node.meta.get("example_value")
    for given in named:
        for axis, size in enumerate(given.meta["example_value"].shape):
            if isinstance(symbol, torch.SymInt) and _same(size, symbol):
                return graph.call_function(torch.ops.aten.sym_size.int, (given, axis))
    raise CaptureError(
        f"input {node.name} of the graph",
        f"{symbol!r}",
        "tensors, and sizes of them",
        "use qcompile.load for this model",
    )


def _same(size: object, symbol: torch.SymInt) -> bool:
    return isinstance(size, torch.SymInt) and bool(size.node.expr == symbol.node.expr)
