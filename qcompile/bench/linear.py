"""A kernel and a packed weight as a function.

Comes in: a kernel and a weight. Goes out: the weight in the kernel's layout, and what the kernel
emits as a call. Always holds: the call is the graph that the compiler would get, and nothing more.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from qcompile.edge import find_route
from qcompile.kernel import Kernel
from qcompile.layout import QuantizedTensor
from qcompile.ops import embedding, linear


def pack(weight: QuantizedTensor, layout: str) -> QuantizedTensor:
    """The weight in a kernel's layout."""
    route = find_route(weight.layout, weight.spec, layout)
    assert route is not None, f"no edge from {weight.layout} to {layout}"
    return route.apply(weight)


def call_of(kernel: Kernel, weight: QuantizedTensor) -> Callable[..., torch.Tensor]:
    """What the kernel emits for one site, as a function of the input and the weight's parts."""
    graph = fx.Graph()
    first = graph.placeholder("first")
    parts = [graph.placeholder(name) for name in weight.parts]
    op, last = (linear, None) if kernel.kind == "linear" else (embedding, torch.float32)
    node = graph.call_function(op, (first, parts, "", last))
    with graph.inserting_before(node):
        result = kernel.emit(graph, node, parts, weight)
    graph.erase_node(node)
    graph.output(result)
    return fx.GraphModule({}, graph).forward
