"""Canonical nodes with a quantized weight become ops of ``qcompile::``.

Before: ``aten.linear(x, w, b)`` and ``aten.embedding(w, ids)``.
After: ``qcompile.linear(x, [parts of w], meaning, b)`` and
``qcompile.embedding(ids, [parts of w], meaning, dtype)``, where the parts are handles and the dtype
is that of the weight the model was traced with. Where autocast gave a linear another dtype than its
input's, the input is cast first: ``qcompile.linear(x.to(dtype), ...)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx
from torch.fx.node import Argument

from qcompile import ops
from qcompile.layout import QuantizedTensor
from qcompile.program import Program, site_name
from qcompile.spec import is_quantized
from qcompile.weight import WeightRef

_LINEAR = torch.ops.aten.linear.default
_EMBEDDING = torch.ops.aten.embedding.default


@dataclass(frozen=True)
class SwapQuantized:
    """See the module's text.

    Attributes:
        catalogue: weights by canonical parameter name.
    """

    catalogue: Mapping[str, WeightRef]
    name: str = "quantize.swap"

    def run(self, program: Program) -> int:
        """Rewrite the program; the number of nodes that changed."""
        return sum(self._rewrite(program, node) for node in program.nodes((_LINEAR, _EMBEDDING)))

    def _rewrite(self, program: Program, node: fx.Node) -> bool:
        place = 1 if node.target is _LINEAR else 0
        weight = self._weight(program, node.args[place])
        if weight is None:
            return False
        meaning = ops.encode_meaning(QuantizedTensor(weight.spec, weight.layout, weight.shape, {}))
        with program.graph.inserting_before(node):
            parts = program.add_handle(weight)
            new = _canonical_op(program.graph, node, parts, meaning)
        new.meta["qc_weight"] = weight.name
        new.meta["qc_site"] = site_name(node, weight.name.rpartition(".")[0])
        program.replace(node, new)
        return True

    def _weight(self, program: Program, node: object) -> WeightRef | None:
        if not isinstance(node, fx.Node) or node not in program.weights:
            return None
        weight = self.catalogue.get(program.weights[node])
        return weight if weight is not None and is_quantized(weight.spec) else None


def _canonical_op(graph: fx.Graph, node: fx.Node, parts: list[fx.Node], meaning: str) -> fx.Node:
    if node.target is _EMBEDDING:
        traced = node.args[0]
        assert isinstance(traced, fx.Node)
        dtype = _dtype(traced)
        assert dtype is not None
        return graph.call_function(ops.embedding, (node.args[1], parts, meaning, dtype))
    bias = node.args[2] if len(node.args) > 2 else None
    traced = _dtype(node)
    x, bias = (_cast(graph, value, traced) for value in (node.args[0], bias))
    return graph.call_function(ops.linear, (x, parts, meaning, bias))


def _cast(graph: fx.Graph, value: Argument, dtype: torch.dtype | None) -> Argument:
    """The value in the dtype that the traced op computed in; ops of ours know no autocast."""
    if not isinstance(value, fx.Node) or dtype is None or _dtype(value) in (dtype, None):
        return value
    return graph.call_function(torch.ops.aten.to.dtype, (value, dtype))


def _dtype(node: fx.Node) -> torch.dtype | None:
    value = node.meta.get("example_value", node.meta.get("val"))
    return value.dtype if isinstance(value, torch.Tensor) else None
