"""Each canonical op becomes its kernel's call on packed parts.

Before: ``qcompile.linear(x, handles, meaning, b)``. After: for instance
``qcompile_cpu.panel_linear(x, blob, ..., b)``, or a float op where the plan says ``dequantized``.
A canonical op that the plan does not know is an error that names the node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from qcompile.errors import LowerError
from qcompile.layout import QuantizedTensor
from qcompile.ops import embedding, encode_meaning
from qcompile.ops_experts import experts
from qcompile.plans import Entry
from qcompile.program import Program, node_key, weight_name
from qcompile.site import SiteKey


@dataclass(frozen=True)
class Lower:
    """See the module's text.

    Attributes:
        entries: the plan's entries by the key of their site.
        packed: gives the packed weight of an entry; one object for each weight and layout.
    """

    entries: Mapping[SiteKey, Entry]
    packed: Callable[[Entry], QuantizedTensor]
    name: str = "lower"

    def run(self, program: Program) -> int:
        """Rewrite the program; the number of nodes that changed."""
        nodes = program.canonical_nodes()
        for node in nodes:
            entry = self.entries.get(node_key(node))
            if entry is None:
                raise _left_over(node)
            weight = self.packed(entry)
            with program.graph.inserting_before(node):
                parts = [
                    _constant(program, entry, name, part) for name, part in weight.parts.items()
                ]
                new = _emit(program.graph, node, parts, weight, entry)
            program.replace(node, new)
        _drop_handles(program)
        return len(nodes)


def _constant(program: Program, entry: Entry, part: str, tensor: torch.Tensor) -> fx.Node:
    name = f"{entry.site.weight.name}_{entry.layout}_{part}"
    node = program.constant(name, tensor)
    program.packed[str(node.target)] = tensor
    return node


def _emit(
    graph: fx.Graph, node: fx.Node, parts: list[fx.Node], weight: QuantizedTensor, entry: Entry
) -> fx.Node:
    if entry.kernel is not None:
        return entry.kernel.emit(graph, node, parts, weight)
    x = node.args[0]
    if node.target is experts:
        return graph.call_function(experts, (x, parts, encode_meaning(weight), *node.args[3:]))
    if node.target is embedding:
        rows = graph.call_function(torch.ops.aten.embedding.default, (parts[0], x))
        return graph.call_function(torch.ops.aten.to.dtype, (rows, node.args[3]))
    bias = node.args[3] if len(node.args) > 3 else None
    return graph.call_function(torch.ops.aten.linear.default, (x, parts[0], bias))


def _drop_handles(program: Program) -> None:
    for node in list(program.graph.nodes):
        if node.op == "get_attr" and not node.users and node.target not in program.packed:
            program.graph.erase_node(node)
            # Sites that share a weight share its handles.
            program.graph_module._buffers.pop(str(node.target), None)


def _left_over(node: fx.Node) -> LowerError:
    return LowerError(
        f"node {node.name} ({node.meta.get('qc_site', 'unnamed site')})",
        f"the plan has no entry for the weight {weight_name(node)!r}",
        "an entry for every canonical op",
        "report this: the site was not planned",
    )
