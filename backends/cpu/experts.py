"""``cpu.panel_experts``: both products of every chosen expert on packed panels.

Comes in: tokens, chosen experts and their weights. Goes out: the weighted sums, in the dtype of the
tokens.
Always holds: both products have the numerics of ``cpu.panel_linear``; what lies between them and
the routing weights are float32, rounded once at the end. One token touches the experts it chose and
no others; many tokens are grouped by expert, so that an expert's panels are decoded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from qcompile.activation import Activation
from qcompile.backends.cpu import panel
from qcompile.backends.cpu.linear import panel_cost
from qcompile.backends.cpu.probe import missing_compiler
from qcompile.edge import register_edge
from qcompile.experts_layout import experts_edge, experts_layout
from qcompile.kernel import Accept, Reject, Tolerance
from qcompile.layout import QuantizedTensor, register_layout
from qcompile.site import Site
from qcompile.spec import ExpertsSpec, ScaledSpec
from qcompile.target import Target

NAME = "cpu.panel_experts"
_KINDS = {"gate": 0, "up": 1, "gate_up": 2, "down": 3}

panel.library.define(
    "panel_experts(Tensor x, Tensor ids, Tensor weights, Tensor[] parts, int[] shape,"
    " Tensor? up_bias, Tensor? down_bias, str function, bool gated, float alpha, float limit,"
    " int digits) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
EXPERTS = register_layout(experts_layout(NAME, panel.NAME))
EDGE = register_edge(experts_edge(NAME, panel.NAME))


@dataclass(frozen=True)
class PanelExperts:
    """See the module's text.

    Attributes:
        digits: signed bytes of an activation; 0 lets its dtype decide.
    """

    name: str = "cpu.panel_experts"
    kind: str = "experts"
    layout: str | None = NAME
    digits: int = 0
    tolerance: Tolerance = Tolerance(2e-6, "two products, each as exact as the linear kernel")

    def accepts(self, site: Site, target: Target) -> Accept | Reject:
        """Experts whose matrices all fit panels."""
        if target.kind != "cpu":
            return Reject(f"runs on a CPU; the target is {target}")
        spec = site.weight.spec
        assert isinstance(spec, ExpertsSpec)
        for role in spec.roles:
            reason = panel.unfit(role.spec)
            if reason is None and self.digits == 1 and isinstance(role.spec, ScaledSpec):
                reason = "narrow floats are multiplied with activations as they are"
            if reason:
                return Reject(f"{role.role}: {reason}")
        reason = missing_compiler()
        if reason:
            return Reject(reason)
        return panel_cost(site, self.digits, f"{spec}, only the chosen experts")

    def emit(
        self, graph: fx.Graph, node: fx.Node, parts: Sequence[fx.Node], weight: QuantizedTensor
    ) -> fx.Node:
        """One call for the whole layer."""
        x, _, _, ids, shares, up_bias, down_bias, text = node.args
        chosen = Activation.parse(str(text))
        function = (chosen.function, chosen.gated, chosen.alpha, chosen.limit, self.digits)
        arguments = (x, ids, shares, list(parts), _shape(weight), up_bias, down_bias, *function)
        return graph.call_function(torch.ops.qcompile_cpu.panel_experts.default, arguments)


def _shape(weight: QuantizedTensor) -> list[int]:
    """Eight numbers a role, as the op takes them."""
    assert isinstance(weight.spec, ExpertsSpec)
    numbers: list[int] = []
    for role in weight.spec.roles:
        matrix = panel.arguments(role.spec, (role.rows, role.columns))
        numbers += [_KINDS[role.role], *matrix, int(panel.is_permuted(role.spec))]
    return numbers


EXACT = PanelExperts()
FAST = PanelExperts(
    name="cpu.panel_experts_int8",
    digits=1,
    tolerance=Tolerance(4e-2, "activations of both products are rounded to 8 bits by groups"),
)


@torch.library.register_fake("qcompile_cpu::panel_experts")
def _like(x: torch.Tensor, *rest: object) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
