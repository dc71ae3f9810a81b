"""The function between the two products of an expert, as nodes.

Comes in: what the first product made. Goes out: the input of the second.
Always holds: a gated silu without limits is ``npu_swiglu``; any other function is plain tensor
operators in float32, rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from qcompile.activation import Activation

GATED_SILU = Activation("silu")
_Call = Callable[..., fx.Node]


def activated(graph: fx.Graph, inner: Sequence[fx.Node], rows: int, chosen: Activation) -> fx.Node:
    """The function of gate and up.

    Args:
        graph: the graph.
        inner: ``[M, 2 I]`` with gate first, gate and up ``[M, I]`` each, or up alone.
        rows: I.
        chosen: the function.
    """
    aten = torch.ops.aten
    if chosen == GATED_SILU:
        both = inner[0] if len(inner) == 1 else graph.call_function(aten.cat.default, (inner, 1))
        return graph.call_function(torch.ops.npu.npu_swiglu.default, (both,))
    wide = [graph.call_function(aten.to.dtype, (part, torch.float32)) for part in inner]
    if chosen.gated and len(wide) == 1:
        ends = ((0, rows), (rows, 2 * rows))
        wide = [graph.call_function(aten.slice.Tensor, (wide[0], 1, *end)) for end in ends]
    return graph.call_method("type_as", (_value(_caller(graph), wide, chosen), inner[0]))


def _caller(graph: fx.Graph) -> _Call:
    def call(function: Any, *arguments: Any, **named: Any) -> fx.Node:
        return graph.call_function(function, arguments, named)

    return call


def _value(call: _Call, wide: Sequence[fx.Node], chosen: Activation) -> fx.Node:
    aten = torch.ops.aten
    if not chosen.gated:
        return _plain(call, wide[0], chosen.function)
    gate, up = wide
    if chosen.limit != math.inf:
        gate = call(aten.clamp.default, gate, None, chosen.limit)
        up = call(aten.clamp.default, up, -chosen.limit, chosen.limit)
    if chosen.function != "swiglu_oai":
        return call(aten.mul.Tensor, _plain(call, gate, chosen.function), up)
    share = call(aten.sigmoid.default, call(aten.mul.Tensor, gate, chosen.alpha))
    gate = call(aten.mul.Tensor, gate, share)
    return call(aten.mul.Tensor, call(aten.add.Tensor, up, 1.0), gate)


def _plain(call: _Call, x: fx.Node, name: str) -> fx.Node:
    aten = torch.ops.aten
    if name == "identity":
        return x
    if name in ("gelu", "gelu_tanh"):
        how = "none" if name == "gelu" else "tanh"
        return call(aten.gelu.default, x, approximate=how)
    if name == "relu2":
        positive = call(aten.relu.default, x)
        return call(aten.mul.Tensor, positive, positive)
    functions = {
        "silu": aten.silu.default,
        "relu": aten.relu.default,
        "sigmoid": aten.sigmoid.default,
        "tanh": aten.tanh.default,
    }
    return call(functions[name], x)
