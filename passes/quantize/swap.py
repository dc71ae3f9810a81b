"""Canonical nodes with a quantized weight become ops of ``qcompile::``.

Before: ``aten.linear(x, w, b)`` and ``aten.embedding(w, ids)``.
After: ``qcompile.linear(x, [parts of w], meaning, b)`` and
``qcompile.embedding(ids, [parts of w], meaning, dtype)``, where the parts are handles and the dtype
is that of the weight the model was traced with. ``qcompile.moe(x, ids, weights, up, down, ...)``
becomes ``qcompile.experts(x, [parts of both], meaning, ids, weights, ...)``; a bias whose gate and
up columns come in turns is put in order first. Where autocast gave a linear another dtype than its
input's, the input is cast first: ``qcompile.linear(x.to(dtype), ...)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx
from torch.fx.node import Argument

from qcompile import ops
from qcompile.activation import Activation
from qcompile.experts_layout import experts_weight
from qcompile.layout import QuantizedTensor
from qcompile.ops_experts import experts, moe
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
        changed = sum(self._rewrite(program, node) for node in program.nodes((_LINEAR, _EMBEDDING)))
        return changed + sum(self._experts(program, node) for node in program.nodes((moe,)))

    def _experts(self, program: Program, node: fx.Node) -> bool:
        x, ids, shares, up_node, down_node, up_bias, down_bias, text, _ = node.args
        up, down = self._weight(program, up_node), self._weight(program, down_node)
        if up is None and down is None:
            return False
        module = program.weights[up_node].rpartition(".")[0]  # type: ignore[index]
        weight = experts_weight(module, up, down)
        meaning = ops.encode_meaning(QuantizedTensor(weight.spec, weight.layout, weight.shape, {}))
        activation = Activation.parse(str(text))
        with program.graph.inserting_before(node):
            if activation.interleaved and isinstance(up_bias, fx.Node):
                up_bias = _in_order(program.graph, up_bias)
            parts = program.add_handle(weight)
            plain = str(replace(activation, interleaved=False))
            arguments = (x, parts, meaning, ids, shares, up_bias, down_bias, plain)
            new = program.graph.call_function(experts, arguments)
        new.meta["qc_weight"] = weight.name
        new.meta["qc_site"] = site_name(node, module)
        program.replace(node, new)
        return True

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


def _in_order(graph: fx.Graph, bias: fx.Node) -> fx.Node:
    """A bias ``[E, 2 I]`` whose gate and up columns come in turns, as gate columns then up."""
    halves = [
        graph.call_function(torch.ops.aten.slice.Tensor, (bias, 1, first, 2**63 - 1, 2))
        for first in (0, 1)
    ]
    return graph.call_function(torch.ops.aten.cat.default, (halves, 1))


def _cast(graph: fx.Graph, value: Argument, dtype: torch.dtype | None) -> Argument:
    """The value in the dtype that the traced op computed in; ops of ours know no autocast."""
    if not isinstance(value, fx.Node) or dtype is None or _dtype(value) in (dtype, None):
        return value
    return graph.call_function(torch.ops.aten.to.dtype, (value, dtype))


def _dtype(node: fx.Node) -> torch.dtype | None:
    value = node.meta.get("example_value", node.meta.get("val"))
    return value.dtype if isinstance(value, torch.Tensor) else None
