"""``npu.linear_w8a8``: int8 activations times int8 weights.

Comes in: activations of any leading shape. Goes out: ``x @ w.T + bias`` in their dtype, with x
rounded to int8 token by token. Always holds: only for weights whose checkpoint asks for just that.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from qcompile.backends.npu.contract import quant_matmul
from qcompile.backends.npu.contract.quant_matmul import DynamicCall, QuantCall
from qcompile.backends.npu.emit import (
    by_runs,
    empty_result,
    has_no_rows,
    matrix,
    runs,
    unflattened,
)
from qcompile.backends.npu.layouts import LAYOUTS, W8A8
from qcompile.backends.npu.linear import arch_of, wrong_place
from qcompile.kernel import Accept, Reject, Tolerance
from qcompile.layout import QuantizedTensor
from qcompile.site import LinearSite, Site
from qcompile.spec import ActivationSpec, AffineSpec
from qcompile.target import Target
from qcompile.weight import WeightRef

ASKED = ActivationSpec(torch.int8, "token", dynamic=True, symmetric=True)


@dataclass(frozen=True)
class QuantLinear:
    """See the module's text.

    Attributes:
        activations: dtype of the activations outside the product.
    """

    activations: torch.dtype

    name = "npu.linear_w8a8"
    kind = "linear"
    layout: str | None = W8A8

    @property
    def tolerance(self) -> Tolerance:
        """What rounding each token to 255 steps costs."""
        return Tolerance(2e-2, "activations are int8, 127 steps to the largest of a token")

    def accepts(self, site: Site, target: Target) -> Accept | Reject:
        """Weights with a scale a channel, whose checkpoint asks for int8 activations."""
        weight = site.weight
        reason = wrong_place(site, target) or self._unasked(weight) or self._violated(site, target)
        if reason is not None:
            return Reject(reason)
        # Integer products run at twice the rate, and read as many bytes.
        cost = 0.8 * LAYOUTS[W8A8].nbytes(weight.spec, weight.shape)
        return Accept(cost, f"int8 by channels, activations {weight.activations}")

    def _unasked(self, weight: WeightRef) -> str | None:
        if weight.activations != ASKED:
            asked = weight.activations or "floats"
            return f"the checkpoint wants activations {asked}, not {ASKED}"
        spec = weight.spec
        fits = isinstance(spec, AffineSpec) and spec.group >= weight.shape[1]
        return None if fits else f"{quant_matmul.NAME} takes one scale a channel; spec {spec}"

    def _violated(self, site: Site, target: Target) -> str | None:
        n, k = site.weight.shape
        rows, arch = runs(n)[0][1], arch_of(target)
        x = torch.empty(1, k, dtype=self.activations, device="meta")
        parts = LAYOUTS[W8A8].empty(site.weight.spec, (rows, k), device="meta")
        bias = None
        if isinstance(site, LinearSite) and site.bias:
            bias = torch.empty(rows, dtype=torch.float32, device="meta")
        call = QuantCall(
            arch,
            x.to(torch.int8),
            parts["weight"].t(),
            parts["scale"],
            torch.empty(1, device="meta"),
            bias,
            self.activations,
        )
        broken = quant_matmul.violated_dynamic(DynamicCall(arch, x)) or quant_matmul.violated(call)
        return None if broken is None else f"{quant_matmul.NAME}: {broken}"

    def emit(
        self, graph: fx.Graph, node: fx.Node, parts: Sequence[fx.Node], weight: QuantizedTensor
    ) -> fx.Node:
        """The activations' codes and scales, then one product for each run of outputs."""
        ops, x, (n, k) = torch.ops, node.args[0], weight.shape
        assert isinstance(x, fx.Node)
        if has_no_rows(x):
            return empty_result(graph, x, n)
        bias = node.args[3] if len(node.args) > 3 else None
        assert bias is None or isinstance(bias, fx.Node)
        if bias is not None:
            bias = graph.call_function(ops.aten.to.dtype, (bias, torch.float32))
        both = graph.call_function(ops.npu.npu_dynamic_quant.default, (matrix(graph, x, k),))
        codes, token = (graph.call_function(operator.getitem, (both, i)) for i in (0, 1))

        def product(run: list[fx.Node | None]) -> fx.Node:
            turned = graph.call_function(ops.aten.t.default, (run[0],))
            return graph.call_function(
                ops.npu.npu_quant_matmul.default,
                (codes, turned, run[1]),
                {"pertoken_scale": token, "bias": run[2], "output_dtype": self.activations},
            )

        y = by_runs(graph, n, [parts[0], parts[1], bias], product)
        return unflattened(graph, y, x, n)
