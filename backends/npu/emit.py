"""Pieces of lowered graphs that the linear kernels share.

Comes in: nodes. Goes out: nodes. Always holds: the vendor's products get two dimensions, a
contiguous input, at most 65535 outputs a call and at least one row; what a graph shows of shapes
is used, and what it leaves open costs a few shape nodes that move no data.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import fx

from qcompile.backends.npu.contract.rules import LARGEST

_ALIGNED = 64


def shape_of(node: object) -> tuple[int | torch.SymInt, ...] | None:
    """The shape that the trace recorded for a node, None where there is none."""
    if not isinstance(node, fx.Node):
        return None
    value = node.meta.get("example_value", node.meta.get("val"))
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def has_no_rows(node: object) -> bool:
    """Whether an input is known to be empty. Empty inputs are traced apart from others."""
    shape = shape_of(node)
    return shape is not None and any(isinstance(extent, int) and extent == 0 for extent in shape)


def matrix(graph: fx.Graph, x: fx.Node, columns: int) -> fx.Node:
    """``x[..., K]`` as a contiguous ``[M, K]``."""
    aten = torch.ops.aten
    shape = shape_of(x)
    if shape is None or len(shape) != 2:
        x = graph.call_function(aten.reshape.default, (x, [-1, columns]))
    return graph.call_function(aten.contiguous.default, (x,))


def unflattened(graph: fx.Graph, y: fx.Node, like: fx.Node, columns: int) -> fx.Node:
    """``y [M, N]`` with the leading dimensions of ``like[..., K]``."""
    shape = shape_of(like)
    if shape is not None and len(shape) == 2:
        return y
    size = graph.call_method("size", (like,))
    lead = graph.call_function(operator.getitem, (size, slice(None, -1)))
    return graph.call_method("reshape", (y, graph.call_function(operator.add, (lead, (columns,)))))


def empty_result(graph: fx.Graph, like: fx.Node, columns: int) -> fx.Node:
    """The result ``[..., N]`` of a product with no rows."""
    size = graph.call_method("size", (like,))
    lead = graph.call_function(operator.getitem, (size, slice(None, -1)))
    shape = graph.call_function(operator.add, (lead, (columns,)))
    return graph.call_method("new_zeros", (like, shape))


def runs(rows: int) -> list[tuple[int, int]]:
    """Runs of output rows, ``(start, stop)``, none longer than an operator takes."""
    if rows <= LARGEST:
        return [(0, rows)]
    count = -(-rows // LARGEST)
    size = -(-rows // count // _ALIGNED) * _ALIGNED
    return [(start, min(start + size, rows)) for start in range(0, rows, size)]


def by_runs(
    graph: fx.Graph,
    rows: int,
    parts: list[fx.Node | None],
    product: Callable[[list[fx.Node | None]], fx.Node],
) -> fx.Node:
    """The product of each run of rows, side by side.

    Args:
        graph: the graph.
        rows: output rows in all.
        parts: what has output rows in its first dimension.
        product: ``[M, rows of a run]`` from the parts of a run.
    """
    aten, pieces = torch.ops.aten, []
    for start, stop in (found := runs(rows)):
        if len(found) == 1:
            return product(parts)
        run = [
            None if p is None else graph.call_function(aten.slice.Tensor, (p, 0, start, stop))
            for p in parts
        ]
        pieces.append(product(run))
    return graph.call_function(aten.cat.default, (pieces, 1))
