"""``npu.linear_int4`` and ``npu.linear_int8``: products with packed weights.

Comes in: activations of any leading shape. Goes out: ``x @ w.T + bias`` in their dtype.
Always holds: the operator is ``npu_weight_quant_batchmatmul``; what it refuses is refused here, by
its own rules, before a weight is read.

Each width exists in two orders. ``[K, N]`` is what the vendor recommends with groups; ``[N, K]``,
taken transposed, is what it recommends for channels, what an embedding can share, and what more
than 65535 outputs need, because a run of rows stays contiguous.

``npu.linear_int4x2`` is for groups that the operator takes only when they are twice as long: every
column has two places, one for the upper half of a value and one for the lower. Of an input there is
``x`` beside the one and ``x / 16`` beside the other, which is exact but for float16 below 2**-10.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from qcompile.backends.npu.contract import weight_quant
from qcompile.backends.npu.contract.weight_quant import WeightQuantCall
from qcompile.backends.npu.emit import (
    by_runs,
    empty_result,
    has_no_rows,
    matrix,
    runs,
    unflattened,
)
from qcompile.backends.npu.layouts import (
    LAYOUTS,
    STEP,
    Order,
    has_offset,
    is_narrow,
    is_permuted,
    unfit,
    unfit_halves,
)
from qcompile.backends.npu.nibbles import PER_WORD
from qcompile.kernel import Accept, Reject, Tolerance
from qcompile.layout import QuantizedTensor, Shape
from qcompile.site import LinearSite, Site
from qcompile.spec import AffineSpec, LookupSpec, Spec
from qcompile.target import Target

DEFAULT_ARCH = "910b"


def arch_of(target: Target) -> str:
    """The architecture whose rules hold; those of the A2 where none is named."""
    return target.arch or DEFAULT_ARCH


def wrong_place(site: Site, target: Target) -> str | None:
    """Why no kernel of this backend takes a site, or None."""
    if target.kind != "npu":
        return f"runs on an Ascend device; the target is {target}"
    if len(site.weight.shape) != 2:
        return f"a weight of {len(site.weight.shape)} dimensions; a matrix is needed"
    return None


def misfit(spec: Spec, shape: Shape, order: Order) -> str | None:
    """Why a weight cannot be stored in this order, or None."""
    if order.halves:
        return unfit_halves(spec) or _uneven(spec, shape[1])
    packed = shape[1] if order.rows_first else shape[0]
    if order.bits == 4 and packed % PER_WORD:
        way = "K" if order.rows_first else "N"
        return f"{way} is {packed}, no multiple of the {PER_WORD} codes in a word"
    return unfit(spec, order.bits)


def _uneven(spec: Spec, columns: int) -> str | None:
    assert isinstance(spec, (AffineSpec, LookupSpec))
    group = spec.group
    if group % STEP or group >= columns or columns % group:
        return f"for groups of a multiple of {STEP} that divides K; the group is {group}"
    return None if group % (2 * STEP) else f"groups of {group} need not be doubled"


def group_size(spec: Spec, columns: int) -> int:
    """``antiquant_group_size``: 0 where a whole row shares a scale."""
    assert isinstance(spec, (AffineSpec, LookupSpec))
    return 0 if spec.group >= columns else spec.group


@dataclass(frozen=True)
class PackedLinear:
    """See the module's text.

    Attributes:
        order: how the weight lies.
        activations: dtype of the activations; the order's, unless no operator takes it.
    """

    order: Order
    activations: torch.dtype

    kind = "linear"

    @property
    def name(self) -> str:
        """The kernel's name."""
        turned = self.order.rows_first and not self.order.halves
        return f"npu.linear_{self.order.width}{'_t' if turned else ''}"

    @property
    def layout(self) -> str | None:
        """The layout of its weights."""
        return self.order.name

    @property
    def tolerance(self) -> Tolerance:
        """What decoding and the result round to."""
        eps = torch.finfo(self.order.dtype).eps
        return Tolerance(2 * eps, "scales, offsets and decoded weights are in the dtype of x")

    def accepts(self, site: Site, target: Target) -> Accept | Reject:
        """Weights whose groups, widths and sizes the operator takes."""
        weight = site.weight
        reason = wrong_place(site, target) or misfit(weight.spec, weight.shape, self.order)
        reason = reason or self._violated(site, target)
        if reason is not None:
            return Reject(reason)
        n, k = weight.shape
        size, group = LAYOUTS[self.order.name].nbytes(weight.spec, weight.shape), 0
        group = group_size(weight.spec, k)
        liked = self.order.rows_first == (group == 0)
        note = f"{self.order.width} " + (f"by groups of {group}" if group else "by channels")
        if (count := len(runs(n))) > 1 and self.order.rows_first:
            note += f", in {count} runs of outputs"
        if weight.activations is not None:
            note += f"; activations stay floats, where the checkpoint allows {weight.activations}"
        return Accept(size * (1.0 if liked else 1.05), note)

    def _violated(self, site: Site, target: Target) -> str | None:
        """The rule that the call would break, judged on tensors without storage."""
        n, k = site.weight.shape
        rows = runs(n)[0][1] if self.order.rows_first else n
        times = 2 if self.order.halves else 1
        spec = site.weight.spec
        assert isinstance(spec, (AffineSpec, LookupSpec))
        plain = replace(spec, order="sequential") if isinstance(spec, AffineSpec) else spec
        parts = LAYOUTS[self.order.name].empty(plain, (rows, k), device="meta")
        turned = {key: p.t() if self.order.rows_first else p for key, p in parts.items()}
        bias = None
        if isinstance(site, LinearSite) and site.bias:
            wide = self.activations == torch.bfloat16
            dtype = torch.float32 if wide else self.activations
            bias = torch.empty(rows, dtype=dtype, device="meta")
        broken = weight_quant.violated(
            WeightQuantCall(
                arch_of(target),
                torch.empty(1, k * times, dtype=self.activations, device="meta"),
                turned["weight"],
                turned["scale"],
                turned.get("offset"),
                bias,
                group_size(spec, k) * times,
            )
        )
        return None if broken is None else f"{weight_quant.NAME}: {broken}"

    def emit(
        self, graph: fx.Graph, node: fx.Node, parts: Sequence[fx.Node], weight: QuantizedTensor
    ) -> fx.Node:
        """One call for each run of outputs; before it a gather where columns are permuted."""
        x, (n, k) = node.args[0], weight.shape
        assert isinstance(x, fx.Node)
        if has_no_rows(x):
            return empty_result(graph, x, n)
        bias = node.args[3] if len(node.args) > 3 else None
        assert bias is None or isinstance(bias, fx.Node)
        if bias is not None and self.order.dtype == torch.bfloat16:
            bias = graph.call_function(torch.ops.aten.to.dtype, (bias, torch.float32))
        flat = matrix(graph, x, k)
        operands = list(parts)
        if is_permuted(weight.spec):
            gather = (flat, 1, operands.pop())
            flat = graph.call_function(torch.ops.aten.index_select.default, gather)
        offset = operands[2] if has_offset(weight.spec) else None
        group = group_size(weight.spec, k)
        if self.order.halves:
            flat = _doubled(graph, flat, group, k, is_narrow(weight.spec))
            group *= 2

        def product(run: list[fx.Node | None]) -> fx.Node:
            turned = [self._turned(graph, part) for part in run[:3]]
            arguments = (flat, *turned, None, None, run[3], group)
            return graph.call_function(
                torch.ops.npu.npu_weight_quant_batchmatmul.default, arguments
            )

        pieces: list[fx.Node | None] = [operands[0], operands[1], offset, bias]
        y = by_runs(graph, n, pieces, product) if self.order.rows_first else product(pieces)
        return unflattened(graph, y, x, n)

    def _turned(self, graph: fx.Graph, part: fx.Node | None) -> fx.Node | None:
        if part is None or not self.order.rows_first:
            return part
        return graph.call_function(torch.ops.aten.t.default, (part,))


def _doubled(graph: fx.Graph, x: fx.Node, group: int, columns: int, narrow: bool) -> fx.Node:
    """Of each group of inputs first themselves, then what the lower halves get."""
    aten = torch.ops.aten
    upper = graph.call_function(aten.reshape.default, (x, [-1, group]))
    if narrow:
        lower = graph.call_function(aten.zeros_like.default, (upper,))
    else:
        lower = graph.call_function(aten.mul.Tensor, (upper, 1 / STEP))
    both = graph.call_function(aten.cat.default, ([upper, lower], 1))
    return graph.call_function(aten.reshape.default, (both, [-1, 2 * columns]))
