"""The layout of experts that the grouped product reads, and the edge that leads there.

Comes in: the matrices of all experts, in ``experts``. Goes out: the operator's operands.
Always holds: a matrix of four bits or fewer is stored in four, any other in eight or in two times
four.

``npu.experts.DTYPE`` has the parts of ``experts``, every matrix in ``npu.int4.kn.DTYPE`` where its
codes fit, in ``npu.int8.kn.DTYPE`` where they are wider and a row has one scale, and in
``npu.int4x2.kn.DTYPE`` where they have groups, because the grouped product has those for four bits
alone. It needs an offset even where zero points are in the middle, so such a matrix is stored with
a zero point and offsets of 0.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from qcompile.backends.npu.contract.rules import name_of
from qcompile.backends.npu.edges import loss
from qcompile.backends.npu.layouts import DTYPES, ORDERS
from qcompile.backends.npu.planes import PLANES
from qcompile.edge import Edge, Route, find_route, register_edge
from qcompile.experts_layout import EXPERTS, role_weight
from qcompile.layout import Layout, QuantizedTensor, layout_of, register_layout
from qcompile.spec import AffineSpec, ExpertsSpec, LookupSpec, RoleSpec, Spec

_ORDERS = {(o.dtype, o.bits): o for o in ORDERS if not o.rows_first}
ORDER_OF = {order.name: order for order in (*ORDERS, *PLANES.values())}


def layout_name(dtype: torch.dtype) -> str:
    """The layout of experts for activations of a dtype."""
    return f"npu.experts.{name_of(dtype)}"


def _routes(spec: Spec, dtype: torch.dtype) -> list[Route] | None:
    """For each role the way to its order."""
    if not isinstance(spec, ExpertsSpec):
        return None
    found = [_way(role, dtype) for role in spec.roles]
    return None if any(way is None for way in found) else [way for way in found if way]


def _way(role: RoleSpec, dtype: torch.dtype) -> Route | None:
    way = find_route(role.layout, role.spec, _ORDERS[dtype, 4].name)
    if way is not None:
        return way
    way = find_route(role.layout, role.spec, _ORDERS[dtype, 8].name)
    if way is None or (isinstance(way.spec, AffineSpec) and way.spec.group >= role.columns):
        return way
    return find_route(role.layout, role.spec, PLANES[dtype].name)


def _shifted(spec: Spec) -> Spec:
    """The same values with a zero point, which the operator cannot do without."""
    if isinstance(spec, LookupSpec) or (isinstance(spec, AffineSpec) and spec.form != "symmetric"):
        return spec
    assert isinstance(spec, AffineSpec)
    return replace(spec, form="zero")


def _target_spec(spec: Spec, dtype: torch.dtype) -> Spec | None:
    found = _routes(spec, dtype)
    if found is None or not isinstance(spec, ExpertsSpec):
        return None
    roles = [
        replace(role, spec=_shifted(way.spec), layout=_layout_after(role, way))  # type: ignore[arg-type]
        for role, way in zip(spec.roles, found, strict=True)
    ]
    return ExpertsSpec(tuple(roles))


def _layout_after(role: RoleSpec, way: Route) -> str:
    return way.edges[-1].dest if way.edges else role.layout


def _apply(weight: QuantizedTensor, dtype: torch.dtype) -> QuantizedTensor:
    spec = weight.spec
    assert isinstance(spec, ExpertsSpec)
    found, target = _routes(spec, dtype), _target_spec(spec, dtype)
    assert found is not None
    assert target is not None
    parts: dict[str, torch.Tensor] = {}
    for role, way in zip(spec.roles, found, strict=True):
        done = [way.apply(role_weight(weight, role, e)).parts for e in range(weight.shape[0])]
        stacked = {name: torch.stack([one[name] for one in done]) for name in done[0]}
        if isinstance(way.spec, AffineSpec) and "offset" not in stacked:
            stacked["offset"] = torch.zeros_like(stacked["scale"])
        # In the order of the matrix's own fields.
        after = QuantizedTensor(_shifted(way.spec), _layout_after(role, way), (0, 0), {})
        names = [f.name for f in layout_of(after.layout).fields(after.spec, shape_of(role))]
        parts.update({f"{role.role}.{name}": stacked[name] for name in names})
    return QuantizedTensor(target, layout_name(dtype), weight.shape, parts)


def shape_of(role: RoleSpec) -> tuple[int, int]:
    """Shape of a role's matrix."""
    return role.rows, role.columns


def _is_exact(spec: Spec, dtype: torch.dtype) -> bool:
    return all(way.error is None for way in _routes(spec, dtype) or ())


def _edge(dtype: torch.dtype) -> Edge:
    return Edge(
        EXPERTS.name,
        layout_name(dtype),
        lambda spec: _target_spec(spec, dtype),
        lambda weight: _apply(weight, dtype),
        error=loss(_ORDERS[dtype, 4]),
        exact=lambda spec: _is_exact(spec, dtype),
    )


for _dtype in DTYPES:
    register_layout(Layout(layout_name(_dtype), EXPERTS.fields, EXPERTS.decode))
    register_edge(_edge(_dtype))
