"""``npu.embedding``: gather packed rows, then decode those.

Comes in: ids of any shape. Goes out: rows in the wanted dtype, the decoded weight rounded once.
Always holds: plain tensor operators that the device has; the whole table is never decoded. It reads
the layouts that ``npu.linear_*_t`` read, so a tied embedding and head share one packed copy. Groups
may have any size.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from qcompile.backends.npu.layouts import LAYOUTS, STEP, Order, has_offset, is_permuted
from qcompile.backends.npu.linear import misfit, wrong_place
from qcompile.backends.npu.nibbles import PER_WORD
from qcompile.kernel import Accept, Reject, Tolerance
from qcompile.layout import QuantizedTensor
from qcompile.site import Site
from qcompile.spec import AffineSpec, LookupSpec
from qcompile.target import Target

# A lookup reads some rows of many.
_SHARE = 0.01


@dataclass(frozen=True)
class PackedEmbedding:
    """See the module's text.

    Attributes:
        order: how the weight lies, rows first.
    """

    order: Order

    kind = "embedding"

    @property
    def name(self) -> str:
        """The kernel's name."""
        return f"npu.embedding_{self.order.width}"

    @property
    def layout(self) -> str | None:
        """The layout of its weights."""
        return self.order.name

    @property
    def tolerance(self) -> Tolerance:
        """What scales and offsets round to."""
        eps = torch.finfo(self.order.dtype).eps
        return Tolerance(2 * eps, "scales and offsets are in the dtype of the activations")

    def accepts(self, site: Site, target: Target) -> Accept | Reject:
        """Weights whose rows are stored in order."""
        weight = site.weight
        reason = wrong_place(site, target) or misfit(weight.spec, weight.shape, self.order)
        if reason is None and is_permuted(weight.spec):
            reason = "rows come out with their columns permuted (act-order)"
        if reason is not None:
            return Reject(reason)
        size = LAYOUTS[self.order.name].nbytes(weight.spec, weight.shape)
        return Accept(_SHARE * size, f"{self.order.width} rows are gathered, then decoded")

    def emit(
        self, graph: fx.Graph, node: fx.Node, parts: Sequence[fx.Node], weight: QuantizedTensor
    ) -> fx.Node:
        """Gather, unpack, scale, cast."""
        aten, ids, (_, k) = torch.ops.aten, node.args[0], weight.shape
        assert isinstance(ids, fx.Node)
        spec = weight.spec
        assert isinstance(spec, (AffineSpec, LookupSpec))
        flat = graph.call_function(aten.reshape.default, (ids, [-1]))
        rows = [graph.call_function(aten.index_select.default, (p, 0, flat)) for p in parts]
        value = self._values(graph, rows[0], weight)
        if has_offset(spec):
            offset = self._spread(graph, rows[2], spec.group, k)
            value = graph.call_function(aten.add.Tensor, (value, offset))
        scale = self._spread(graph, rows[1], spec.group, k)
        value = graph.call_function(aten.mul.Tensor, (value, scale))
        value = graph.call_function(aten.to.dtype, (value, node.args[3]))
        size = graph.call_method("size", (ids,))
        shape = graph.call_function(operator.add, (size, (k,)))
        return graph.call_method("reshape", (value, shape))

    def _values(self, graph: fx.Graph, rows: fx.Node, weight: QuantizedTensor) -> fx.Node:
        """What is scaled, ``[T, K]`` as float32."""
        aten, (_, k), spec = torch.ops.aten, weight.shape, weight.spec
        if not self.order.halves:
            codes = self._unpacked(graph, rows, k)
            return graph.call_function(aten.to.dtype, (codes, torch.float32))
        assert isinstance(spec, (AffineSpec, LookupSpec))
        codes = self._unpacked(graph, rows, 2 * k)
        wide = graph.call_function(aten.to.dtype, (codes, torch.float32))
        halves = graph.call_function(
            aten.reshape.default, (wide, [-1, k // spec.group, 2, spec.group])
        )
        upper, lower = (graph.call_function(aten.select.int, (halves, 2, i)) for i in (0, 1))
        lower = graph.call_function(aten.mul.Tensor, (lower, 1 / STEP))
        value = graph.call_function(aten.add.Tensor, (upper, lower))
        return graph.call_function(aten.reshape.default, (value, [-1, k]))

    def _unpacked(self, graph: fx.Graph, rows: fx.Node, k: int) -> fx.Node:
        """Codes ``[T, K]``. The device has no shift by a tensor, so each place is shifted alone."""
        if not self.order.in_words:
            return rows
        aten = torch.ops.aten
        places = [
            graph.call_function(aten.__rshift__.Scalar, (rows, 4 * place))
            for place in range(PER_WORD)
        ]
        both = graph.call_function(aten.stack.default, (places, -1))
        low = graph.call_function(aten.bitwise_and.Scalar, (both, 15))
        code = graph.call_function(aten.sub.Tensor, (self._lifted(graph, low), 8))
        return graph.call_function(aten.reshape.default, (code, [-1, k]))

    def _lifted(self, graph: fx.Graph, nibble: fx.Node) -> fx.Node:
        """Two's complement of four bits plus 8, from 0 to 15."""
        return graph.call_function(torch.ops.aten.bitwise_xor.Scalar, (nibble, 8))

    def _spread(self, graph: fx.Graph, rows: fx.Node, group: int, k: int) -> fx.Node:
        """Scales ``[T, G]`` as float32, once for every column."""
        aten = torch.ops.aten
        wide = graph.call_function(aten.to.dtype, (rows, torch.float32))
        if group >= k:
            return wide
        wide = graph.call_function(aten.repeat_interleave.self_int, (wide, group, 1))
        return graph.call_function(aten.slice.Tensor, (wide, 1, 0, k)) if k % group else wide
