"""``cuda.triton_experts``: both products of every chosen expert on planar weights.

Comes in: tokens, chosen experts and their shares. Goes out: the weighted sums, in the dtype of the
tokens. Always holds: weights stay packed, and those of an expert that no token chose are not read.

The layout ``cuda.p16_experts.DTYPE`` has the parts of ``experts``, every matrix in
``cuda.p16.DTYPE``. Experts with act-order have an order of columns each: rows are gathered in the
order of their expert before each product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from qcompile.backends.cuda import edges, triton_routed
from qcompile.backends.cuda.coding import coding_of
from qcompile.backends.cuda.layouts import DTYPES, is_permuted
from qcompile.backends.cuda.layouts import layout_name as matrix_layout
from qcompile.backends.cuda.triton_linear import wrong_device
from qcompile.backends.rules import name_of
from qcompile.edge import register_edge
from qcompile.experts_layout import experts_edge, experts_layout
from qcompile.kernel import Accept, Reject, Tolerance
from qcompile.layout import QuantizedTensor, register_layout
from qcompile.ops import encode_meaning
from qcompile.site import Site
from qcompile.spec import ExpertsSpec, RoleSpec
from qcompile.target import Target


def layout_name(dtype: torch.dtype) -> str:
    """The layout for activations of a dtype."""
    return f"cuda.p16_experts.{name_of(dtype)}"


LAYOUTS = {
    dtype: register_layout(experts_layout(layout_name(dtype), matrix_layout(dtype)))
    for dtype in DTYPES
}
EDGES = tuple(
    register_edge(experts_edge(layout_name(dtype), matrix_layout(dtype), edges.loss(dtype)))
    for dtype in DTYPES
)


@dataclass(frozen=True)
class TritonExperts:
    """See the module's text.

    Attributes:
        dtype: of the weight's scales.
        activations: dtype of the activations; the scales', unless no kernel takes it.
    """

    dtype: torch.dtype
    activations: torch.dtype

    name = "cuda.triton_experts"
    kind = "experts"

    @property
    def layout(self) -> str | None:
        """The layout of its weights."""
        return layout_name(self.dtype)

    @property
    def tolerance(self) -> Tolerance:
        """What scales, decoded weights, the inner rows and the result round to."""
        eps = torch.finfo(self.dtype).eps
        return Tolerance(4 * eps, "weights and what is between the products are in the dtype of x")

    def accepts(self, site: Site, target: Target) -> Accept | Reject:
        """Matrices whose groups are whole planes of 16 columns, whatever is between them."""
        spec = site.weight.spec
        assert isinstance(spec, ExpertsSpec)
        reason = wrong_device(target, self.activations)
        if reason is not None:
            return Reject(reason)
        notes = []
        for role in spec.roles:
            coding = coding_of(role.spec, role.columns)
            if isinstance(coding, str):
                return Reject(f"{role.role}: {coding}")
            notes.append(f"{role.role} {coding.low + coding.high} bits{_gathered(role)}")
        size = LAYOUTS[self.dtype].nbytes(spec, site.weight.shape)
        return Accept(float(size), f"{', '.join(notes)}; rows by expert")

    def emit(
        self, graph: fx.Graph, node: fx.Node, parts: Sequence[fx.Node], weight: QuantizedTensor
    ) -> fx.Node:
        """One call for the whole layer."""
        x, _, _, *rest = node.args
        arguments = (x, list(parts), encode_meaning(weight), *rest)
        return graph.call_function(triton_routed.triton_experts, arguments)


def _gathered(role: RoleSpec) -> str:
    """What a plan tells of columns in an order of their own."""
    return " (act-order: rows gathered)" if is_permuted(role.spec) else ""
