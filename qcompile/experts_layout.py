"""The layout ``experts``: the matrices of all experts of a layer as one weight.

Comes in: for every role (gate, up, down) one matrix an expert. Goes out: one weight whose rows are
experts.
Always holds: reading, packing and taking rows work expert by expert, so that one expert is in
flight at most; the matrices of a role have one spec, layout and shape.

The parts are those of each role's own layout, called ``ROLE.PART``, with a leading dimension over
the experts. A weight with the role *down* beside others has the shape
``(E, number of values in an expert / K, K)``; its values have no common matrix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from qcompile.edge import Edge, Route, find_route
from qcompile.errors import LayoutError, SchemeError
from qcompile.layout import Field, Layout, QuantizedTensor, Shape, layout_of, register_layout
from qcompile.spec import ExpertsSpec, FloatSpec, Role, RoleSpec, Spec
from qcompile.weight import Rows, WeightRef

NAME = "experts"


def _fields(spec: Spec, shape: Shape) -> tuple[Field, ...]:
    if not isinstance(spec, ExpertsSpec):
        raise LayoutError(
            f"layout {NAME}", f"spec {spec}", "the specs of roles", "stack the experts first"
        )
    return tuple(
        Field(f"{role.role}.{part.name}", part.dtype, (shape[0], *part.shape))
        for role in spec.roles
        for part in layout_of(role.layout).fields(role.spec, (role.rows, role.columns))
    )


def role_weight(weight: QuantizedTensor, role: RoleSpec, expert: int) -> QuantizedTensor:
    """The matrix of one role of one expert, as views."""
    prefix = f"{role.role}."
    parts = {
        name.removeprefix(prefix): part[expert]
        for name, part in weight.parts.items()
        if name.startswith(prefix)
    }
    return QuantizedTensor(role.spec, role.layout, (role.rows, role.columns), parts)


def _decode(weight: QuantizedTensor) -> torch.Tensor:
    spec = weight.spec
    assert isinstance(spec, ExpertsSpec)
    if len({role.columns for role in spec.roles}) > 1 or len(spec.roles) > 2:
        raise LayoutError(
            f"layout {NAME}",
            f"roles {', '.join(role.role for role in spec.roles)}",
            "roles that form one matrix",
            "decode the roles one by one",
        )
    return torch.stack(
        [
            torch.cat([role_weight(weight, role, e).dequantize() for role in spec.roles])
            for e in range(weight.shape[0])
        ]
    )


EXPERTS = register_layout(Layout(NAME, _fields, _decode))


# **** weights ****


def stack_experts(name: str, roles: Mapping[Role, Sequence[WeightRef]], where: str) -> WeightRef:
    """One weight of the matrices of all experts.

    Args:
        name: the weight's name.
        roles: for each role one weight ``[N, K]`` an expert, in the order of the experts.
        where: the checkpoint and the layer, for messages.

    Raises:
        SchemeError: experts of a role differ in what their matrices mean or how they lie.
    """
    specs = tuple(_role_spec(role, members, where) for role, members in roles.items())
    first = next(iter(roles.values()))
    columns = specs[0].columns
    values = sum(role.rows * role.columns for role in specs)
    shape = (len(first), values // columns, columns)
    spec = ExpertsSpec(specs)

    def read(rows: Rows) -> QuantizedTensor:
        wanted = range(shape[0])[rows] if isinstance(rows, slice) else rows.tolist()
        parts: dict[str, torch.Tensor] = {}
        for role, members in roles.items():
            loaded = [members[e].load() for e in wanted]
            for part in layout_of(members[0].layout).fields(members[0].spec, members[0].shape):
                found = [one.parts[part.name] for one in loaded]
                empty = torch.empty((0, *part.shape), dtype=part.dtype)
                parts[f"{role}.{part.name}"] = torch.stack(found) if found else empty
        return QuantizedTensor(spec, NAME, (len(wanted), *shape[1:]), parts)

    def release() -> None:
        for members in roles.values():
            members[0].release()

    activations = {m.activations for members in roles.values() for m in members}
    facts = dict.fromkeys(m.facts for members in roles.values() for m in members if m.facts)
    return WeightRef(
        name,
        spec,
        NAME,
        shape,
        read,
        f"{where}: {name}",
        release,
        "; ".join(facts),
        activations.pop() if len(activations) == 1 else None,
    )


def join_roles(name: str, weights: Sequence[WeightRef]) -> WeightRef:
    """One weight of several that hold different roles of the same experts."""
    specs = [weight.spec for weight in weights]
    roles = tuple(role for spec in specs if isinstance(spec, ExpertsSpec) for role in spec.roles)
    spec, columns = ExpertsSpec(roles), roles[0].columns
    values = sum(role.rows * role.columns for role in roles)
    shape = (weights[0].shape[0], values // columns, columns)

    def read(rows: Rows) -> QuantizedTensor:
        found = [weight.read(rows) for weight in weights]
        parts = {part: tensor for one in found for part, tensor in one.parts.items()}
        return QuantizedTensor(spec, NAME, (found[0].shape[0], *shape[1:]), parts)

    def release() -> None:
        for weight in weights:
            weight.release()

    facts = dict.fromkeys(weight.facts for weight in weights if weight.facts)
    return replace(
        weights[0],
        name=name,
        spec=spec,
        layout=NAME,
        shape=shape,
        read=read,
        source=f"{weights[0].source.rpartition(': ')[0]}: {name}",
        release=release,
        facts="; ".join(facts),
    )


def experts_weight(name: str, up: WeightRef | None, down: WeightRef | None) -> WeightRef:
    """The weight of an experts site, from those of its two parameters.

    Args:
        name: path of the site.
        up: gate and up, ``[E, 2 I, H]`` or ``[E, I, H]``.
        down: ``[E, H, I]``.

    Raises:
        SchemeError: only one of the two is quantized.
    """
    if up is None or down is None:
        given = up or down
        assert given is not None
        raise SchemeError(
            given.source,
            f"quantized, where the other matrices of {name} are floats",
            "both products of an expert quantized, or neither",
            "quantize the experts of a layer alike",
        )
    return join_roles(f"{name}.weights", [as_roles(up, "gate_up"), as_roles(down, "down")])


def as_roles(weight: WeightRef, role: Role) -> WeightRef:
    """A weight ``[E, N, K]`` in the layout ``experts``; one in another layout has a single role."""
    if weight.layout == NAME:
        return weight
    where = weight.source.rpartition(": ")[0]
    return stack_experts(weight.name, {role: split_experts(weight)}, where)


def split_experts(weight: WeightRef) -> list[WeightRef]:
    """The matrices of a weight ``[E, N, K]`` whose layout has experts in its first dimension."""

    def member(expert: int) -> WeightRef:
        def read(rows: Rows) -> QuantizedTensor:
            whole = weight.read(slice(expert, expert + 1))
            parts = {name: part[0] for name, part in whole.parts.items()}
            one = QuantizedTensor(weight.spec, weight.layout, tuple(weight.shape[1:]), parts)
            return one.take_rows(rows)

        return replace(
            weight, name=f"{weight.name}.{expert}", shape=tuple(weight.shape[1:]), read=read
        )

    return [member(expert) for expert in range(weight.shape[0])]


def _role_spec(role: Role, members: Sequence[WeightRef], where: str) -> RoleSpec:
    first = members[0]
    for member in members[1:]:
        same = (member.spec, member.layout, member.shape) == (first.spec, first.layout, first.shape)
        if not same:
            raise SchemeError(
                f"{where}: {member.name}",
                f"{member.spec} {member.shape}, where {first.name} is {first.spec} {first.shape}",
                f"one spec and shape for the {role} matrices of all experts of a layer",
                "quantize the experts of a layer alike",
            )
    rows, columns = first.shape
    assert not isinstance(first.spec, ExpertsSpec)
    return RoleSpec(role, first.spec, first.layout, rows, columns)


def dequantized_experts(weight: WeightRef, dtype: torch.dtype) -> QuantizedTensor:
    """All experts as floats, decoded one by one."""
    spec = weight.spec
    assert isinstance(spec, ExpertsSpec)
    roles = tuple(replace(role, spec=FloatSpec(dtype), layout="float") for role in spec.roles)
    target = ExpertsSpec(roles)
    parts = EXPERTS.empty(target, weight.shape)
    for expert in range(weight.shape[0]):
        one = weight.read(slice(expert, expert + 1))
        for role in spec.roles:
            parts[f"{role.role}.data"][expert] = role_weight(one, role, 0).dequantize()
        weight.release()
    return QuantizedTensor(target, NAME, weight.shape, parts)


# **** edges ****


def experts_edge(dest: str, matrix_layout: str, error: str | None = None) -> Edge:
    """An edge from ``experts`` that sends every matrix to one layout.

    Args:
        dest: name of the layout of the result, which has the same parts as ``experts``.
        matrix_layout: the layout that every matrix takes there.
        error: what a matrix may lose on its way, None where it may lose nothing.
    """

    def routes(spec: Spec) -> list[Route] | None:
        if not isinstance(spec, ExpertsSpec):
            return None
        found = [find_route(role.layout, role.spec, matrix_layout) for role in spec.roles]
        unfit = any(r is None or (r.error and error is None) for r in found)
        return None if unfit else found  # type: ignore[return-value]

    def target_spec(spec: Spec) -> Spec | None:
        found = routes(spec)
        if found is None or not isinstance(spec, ExpertsSpec):
            return None
        pairs = zip(spec.roles, found, strict=True)
        return ExpertsSpec(
            tuple(replace(role, spec=r.spec, layout=matrix_layout) for role, r in pairs)  # type: ignore[arg-type]
        )

    def fill(weight: QuantizedTensor, parts: Mapping[str, torch.Tensor]) -> None:
        found = routes(weight.spec)
        assert found is not None
        assert isinstance(weight.spec, ExpertsSpec)
        for role, route in zip(weight.spec.roles, found, strict=True):
            prefix = f"{role.role}."
            own = {n.removeprefix(prefix): p for n, p in parts.items() if n.startswith(prefix)}
            for expert in range(weight.shape[0]):
                rooms = {name: part[expert] for name, part in own.items()}
                route.fill(role_weight(weight, role, expert), rooms, f"layout {dest}")

    def apply(weight: QuantizedTensor) -> QuantizedTensor:
        target = target_spec(weight.spec)
        assert target is not None
        device = str(next(iter(weight.parts.values())).device)
        parts = layout_of(dest).empty(target, weight.shape, device)
        fill(weight, parts)
        return QuantizedTensor(target, dest, weight.shape, parts)

    def is_exact(spec: Spec) -> bool:
        return all(route.error is None for route in routes(spec) or ())

    return Edge(NAME, dest, target_spec, apply, error, exact=is_exact, fill=fill)


def experts_layout(name: str, matrix_layout: str) -> Layout:
    """A layout with the parts of ``experts``, every matrix in one layout."""

    def fields(spec: Spec, shape: Shape) -> tuple[Field, ...]:
        if not isinstance(spec, ExpertsSpec) or any(r.layout != matrix_layout for r in spec.roles):
            raise LayoutError(
                f"layout {name}", f"spec {spec}", f"every role in {matrix_layout}", "take the edge"
            )
        return _fields(spec, shape)

    return Layout(name, fields, _decode)
