"""Direct edges from words of 4-bit codes: nothing is unpacked.

Comes in: a weight as GPTQ, AWQ or compressed-tensors store it. Goes out: the operator's operands.
Always holds: the result is bit for bit that of the way over ``affine``.

A word of GPTQ and of compressed-tensors has eight columns of a row, lowest first, which is the
operator's order but for the sign; AWQ's has eight rows of a column in an order of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from qcompile.backends.npu import nibbles
from qcompile.backends.npu.edges import is_exact, loss, narrow, offset_of_zero, target_spec
from qcompile.backends.npu.layouts import ORDERS, Order
from qcompile.edge import Edge, register_edge
from qcompile.layout import QuantizedTensor
from qcompile.spec import AffineSpec, Spec


@dataclass(frozen=True)
class Source:
    """How a scheme stores 4-bit words.

    Attributes:
        layout: the scheme's layout.
        weight: the part with the words.
        scale: the part with the scales; the zero points are ``zeros``.
        by_columns: words ``[N, K / 8]`` of unsigned codes in order, from those stored.
        by_rows: the same ``[K, N / 8]``.
        rows_first: whether scales and zero points are ``[N, G]``.
    """

    layout: str
    weight: str
    scale: str
    by_columns: Callable[[torch.Tensor], torch.Tensor]
    by_rows: Callable[[torch.Tensor], torch.Tensor]
    rows_first: bool


def _same(words: torch.Tensor) -> torch.Tensor:
    return words


def _turned(words: torch.Tensor) -> torch.Tensor:
    return words.t().contiguous()


def _awq_by_columns(words: torch.Tensor) -> torch.Tensor:
    return nibbles.turn(_turned(nibbles.from_awq(words)))


def _by_rows(words: torch.Tensor) -> torch.Tensor:
    return nibbles.turn(_turned(words))


SOURCES = (
    Source("gptq", "qweight", "scales", _turned, nibbles.turn, rows_first=False),
    Source("awq", "qweight", "scales", _awq_by_columns, nibbles.from_awq, rows_first=False),
    Source("awq.gemv", "qweight", "scales", _same, _by_rows, rows_first=True),
    Source("ct.packed", "packed", "scale", _same, _by_rows, rows_first=True),
)


def _fits(spec: Spec, order: Order) -> Spec | None:
    if not isinstance(spec, AffineSpec) or spec.bits != 4 or spec.order != "sequential":
        return None
    return None if spec.form == "offset" else target_spec(spec, order)


def apply(weight: QuantizedTensor, source: Source, order: Order) -> QuantizedTensor:
    """The operands of a weight in a scheme's words."""
    spec, target = weight.spec, _fits(weight.spec, order)
    assert isinstance(spec, AffineSpec)
    assert target is not None
    words = (source.by_columns if order.rows_first else source.by_rows)(weight.parts[source.weight])
    vectors = {"scale": narrow(weight.parts[source.scale], order)}
    if spec.form == "zero":
        vectors["offset"] = offset_of_zero(weight.parts["zeros"], 4, order)
    turn = source.rows_first != order.rows_first
    parts = {"weight": nibbles.signed(words)}
    for name, vector in vectors.items():
        parts[name] = (vector.t() if turn else vector).contiguous()
    return QuantizedTensor(target, order.name, weight.shape, parts)


def _edge(source: Source, order: Order) -> Edge:
    return Edge(
        source.layout,
        order.name,
        lambda spec: _fits(spec, order),
        lambda weight: apply(weight, source, order),
        error=loss(order),
        exact=lambda spec: is_exact(spec, order),
    )


EDGES = tuple(
    register_edge(_edge(source, order)) for source in SOURCES for order in ORDERS if order.bits == 4
)
