"""``cuda.marlin_experts``: all experts of a layer by an installed operator of the Marlin family.

Comes in: tokens, chosen experts and their shares. Goes out: the weighted sums, in the dtype of the
tokens. Always holds: an expert that no token chose costs nothing; nothing waits for the device.

The layout ``cuda.marlin_experts.DTYPE`` has the parts of ``experts``: every matrix lies in
``cuda.marlin4.DTYPE`` where its codes fit and in ``cuda.marlin8.DTYPE`` otherwise. Gate and up are
one product where the checkpoint has them in one matrix, else two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from qcompile.backends.cuda import schemas
from qcompile.backends.cuda.marlin import PREFERENCE, MarlinWeight, choose
from qcompile.backends.cuda.marlin_edges import loss
from qcompile.backends.cuda.marlin_layout import ORDER_OF, Order, is_permuted
from qcompile.backends.cuda.marlin_routed import marlin_experts
from qcompile.backends.rules import name_of
from qcompile.edge import Edge, Route, find_route, register_edge
from qcompile.experts_layout import EXPERTS, role_weight
from qcompile.kernel import Accept, Reject, Tolerance
from qcompile.layout import Layout, QuantizedTensor, register_layout
from qcompile.ops import encode_meaning
from qcompile.site import Site
from qcompile.spec import AffineSpec, ExpertsSpec, Spec
from qcompile.target import Target


def layout_name(dtype: torch.dtype) -> str:
    """The layout for activations of a dtype."""
    return f"cuda.marlin_experts.{name_of(dtype)}"


# **** layout ****


def _routes(spec: Spec, dtype: torch.dtype) -> list[Route] | None:
    """For each role the way to four bits, or to eight."""
    if not isinstance(spec, ExpertsSpec):
        return None
    found = []
    for role in spec.roles:
        ways = (find_route(role.layout, role.spec, Order(bits, dtype).name) for bits in (4, 8))
        way = next((way for way in ways if way is not None and way.edges), None)
        if way is None:
            return None
        found.append(way)
    return found


def _target_spec(spec: Spec, dtype: torch.dtype) -> Spec | None:
    found = _routes(spec, dtype)
    if found is None or not isinstance(spec, ExpertsSpec):
        return None
    pairs = zip(spec.roles, found, strict=True)
    roles = [replace(role, spec=way.spec, layout=way.edges[-1].dest) for role, way in pairs]  # type: ignore[arg-type]
    return ExpertsSpec(tuple(roles))


def _apply(weight: QuantizedTensor, dtype: torch.dtype) -> QuantizedTensor:
    spec, found, target = (
        weight.spec,
        _routes(weight.spec, dtype),
        _target_spec(weight.spec, dtype),
    )
    assert isinstance(spec, ExpertsSpec)
    assert found is not None
    assert target is not None
    parts: dict[str, torch.Tensor] = {}
    for role, way in zip(spec.roles, found, strict=True):
        done = [way.apply(role_weight(weight, role, e)).parts for e in range(weight.shape[0])]
        for name in done[0]:
            parts[f"{role.role}.{name}"] = torch.stack([one[name] for one in done])
    return QuantizedTensor(target, layout_name(dtype), weight.shape, parts)


def _edge(dtype: torch.dtype) -> Edge:
    def is_exact(spec: Spec) -> bool:
        return all(way.error is None for way in _routes(spec, dtype) or ())

    return Edge(
        EXPERTS.name,
        layout_name(dtype),
        lambda spec: _target_spec(spec, dtype),
        lambda weight: _apply(weight, dtype),
        error=loss(Order(4, dtype)),
        exact=is_exact,
    )


for _dtype in schemas.HALVES:
    register_layout(Layout(layout_name(_dtype), EXPERTS.fields, EXPERTS.decode))
    register_edge(_edge(_dtype))


# **** kernel ****


@dataclass(frozen=True)
class MarlinExperts:
    """See the module's text.

    Attributes:
        packed: dtype that weights are packed for.
        activations: dtype of the activations; the former, unless no operator takes it.
    """

    packed: torch.dtype
    activations: torch.dtype

    name = "cuda.marlin_experts"
    kind = "experts"

    @property
    def layout(self) -> str | None:
        """The layout of its weights."""
        return layout_name(self.packed)

    @property
    def tolerance(self) -> Tolerance:
        """What decoding and the results of both products round to."""
        eps = torch.finfo(self.packed).eps
        return Tolerance(4 * eps, "weights and both products are in the dtype of x")

    def accepts(self, site: Site, target: Target) -> Accept | Reject:
        """Matrices that one operator takes."""
        spec = site.weight.spec
        assert isinstance(spec, ExpertsSpec)
        weights: list[MarlinWeight] = []
        for role in spec.roles:
            assert isinstance(role.spec, AffineSpec)
            if is_permuted(role.spec):
                text = "each expert has an order of columns of its own (act-order)"
                return Reject(f"{role.role}: {text}")
            weights.append(MarlinWeight(role.spec, role.columns, ORDER_OF[role.layout].bits))
        found = choose(schemas.EXPERTS, target, self.activations, weights)
        if isinstance(found, str):
            return Reject(found)
        widths = ", ".join(
            f"{role.role} in {weight.bits} bits"
            for role, weight in zip(spec.roles, weights, strict=True)
        )
        size = EXPERTS.nbytes(spec, site.weight.shape)
        return Accept(PREFERENCE * size, f"{found.name}: {widths}; rows by expert")

    def emit(
        self, graph: fx.Graph, node: fx.Node, parts: Sequence[fx.Node], weight: QuantizedTensor
    ) -> fx.Node:
        """One call; see ``marlin_routed``."""
        x, _, _, *rest = node.args
        return graph.call_function(
            marlin_experts,
            (x, list(parts), encode_meaning(weight), *rest),
        )
