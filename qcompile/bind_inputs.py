"""Let a lowered graph take named inputs alone, and hold everything else itself.

Before: ``f(s0, w, cache, ids)`` with a size, a parameter and two named inputs.
After: ``f(cache, ids)``; the size is read off ``ids``, the parameter is a constant of the graph.
Always holds: a constant's rows lie one after the other, as in a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from qcompile.errors import CaptureError

Bound = tuple[fx.GraphModule, tuple[torch.Tensor, ...], tuple[str, ...]]
Copies = dict[int, tuple[torch.Tensor, torch.Tensor]]
_FIX = "use qcompile.load for this model"


def bind_inputs(
    graph_module: fx.GraphModule,
    values: Mapping[fx.Node, Any],
    names: Mapping[int, str],
    copies: Copies,
) -> Bound:
    """A copy of a graph that takes named tensors only.

    Args:
        graph_module: a lowered graph as dynamo traced it.
        values: what its placeholders were traced with.
        names: of inputs, by identity of those values.
        copies: constants that had to be copied, by identity of the first; filled, so that graphs
            that share a constant share its copy.

    Returns:
        the copy, a fake tensor and the name of each of its placeholders.

    Raises:
        CaptureError: an input is neither a tensor nor the size of one, or the graph has others
            inside.
    """
    graph = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(graph_module.graph, nodes))
    named: dict[fx.Node, str] = {}
    others: list[fx.Node] = []
    held = _constants(graph_module, copies)
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for original in graph_module.graph.find_nodes(op="placeholder"):
        node, value = nodes[original], values[original]
        if id(value) in names:
            named[node] = names[id(value)]
        elif isinstance(value, torch.Tensor):
            name = _unused(held)
            with graph.inserting_before(first):
                constant = graph.get_attr(name)
            held[name] = _in_rows(value, copies)
            _replace(node, constant)
        else:
            others.append(node)
    for node in others:
        if not node.users:
            graph.erase_node(node)
            continue
        with graph.inserting_before(first):
            _replace(node, _size(graph, node, named))
    module = fx.GraphModule(held, graph)
    kept = module.graph.find_nodes(op="placeholder")
    return (
        module,
        tuple(node.meta["example_value"] for node in kept),
        tuple(named[node] for node in kept),
    )


def _constants(graph_module: fx.GraphModule, copies: Copies) -> dict[str, torch.Tensor]:
    """The tensors that a graph holds already, by the names that nodes have for them."""
    found: dict[str, torch.Tensor] = {}
    for node in graph_module.graph.find_nodes(op="get_attr"):
        name = str(node.target)
        value = getattr(graph_module, name, None)
        if not isinstance(value, torch.Tensor):
            raise CaptureError(
                f"node {node.name} of the graph", f"a {type(value).__name__}", "a tensor", _FIX
            )
        found[name] = _in_rows(value, copies)
    return found


def _unused(held: Mapping[str, torch.Tensor]) -> str:
    number = len(held)
    while f"held_{number}" in held:
        number += 1
    return f"held_{number}"


def _in_rows(value: torch.Tensor, copies: Copies) -> torch.Tensor:
    """A tensor as a file has it: itself, or one copy for all graphs."""
    if value.is_contiguous():
        return value.detach()
    if id(value) not in copies:
        # The tensor is kept too: its id must not pass to another.
        copies[id(value)] = value, value.detach().contiguous()
    return copies[id(value)][1]


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
        f"input {node.name} of the graph", f"{symbol!r}", "tensors, and sizes of them", _FIX
    )


def _same(size: object, symbol: torch.SymInt) -> bool:
    return isinstance(size, torch.SymInt) and bool(size.node.expr == symbol.node.expr)
