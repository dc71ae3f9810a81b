"""Conversions between layouts.

Comes in: a weight in one layout. Goes out: the same weight in another.
Always holds: an edge is exact (decoded values are equal bit for bit) or declares its error in
words; a chain of edges is found before any byte moves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from qcompile.errors import LayoutError
from qcompile.layout import QuantizedTensor
from qcompile.spec import Spec


@dataclass(frozen=True)
class Edge:
    """A conversion from layout ``source`` to layout ``dest``.

    Attributes:
        source: name of the layout it reads.
        dest: name of the layout it writes.
        target_spec: the spec of the result for a weight of this spec, or None when the edge does
            not fit it.
        apply: converts a weight, or a run of its rows.
        error: None when exact, else one sentence that bounds what is lost.
        invert: the conversion back, where there is one.
        exact: the specs for which nothing is lost, where ``error`` holds for the others.
        fill: what ``apply`` does, into parts that are there already, where an edge can spare the
            copy: the fields of its result for the weight's rows, all contiguous.
    """

    source: str
    dest: str
    target_spec: Callable[[Spec], Spec | None]
    apply: Callable[[QuantizedTensor], QuantizedTensor]
    error: str | None = None
    invert: Callable[[QuantizedTensor], QuantizedTensor] | None = None
    exact: Callable[[Spec], bool] = lambda spec: False
    fill: Callable[[QuantizedTensor, Mapping[str, torch.Tensor]], None] | None = None

    @property
    def name(self) -> str:
        """``source -> dest``, as plans print it."""
        return f"{self.source} -> {self.dest}"

    def loss(self, spec: Spec) -> str | None:
        """What a weight of this spec loses on the way, None when nothing."""
        return None if self.error is None or self.exact(spec) else self.error


_EDGES: dict[str, dict[str, Edge]] = {}


def register_edge(edge: Edge) -> Edge:
    """Make an edge known.

    Raises:
        LayoutError: there is an edge between these layouts already.
    """
    outgoing = _EDGES.setdefault(edge.source, {})
    if edge.dest in outgoing:
        raise LayoutError(f"edge {edge.name}", "registered twice", "one edge", "remove one")
    outgoing[edge.dest] = edge
    return edge


def edges() -> tuple[Edge, ...]:
    """Every registered edge."""
    return tuple(edge for outgoing in _EDGES.values() for edge in outgoing.values())


@dataclass(frozen=True)
class Route:
    """A chain of edges that fits one spec, the spec at its end, and what each edge loses."""

    edges: tuple[Edge, ...]
    spec: Spec
    losses: tuple[str | None, ...] = ()

    @property
    def error(self) -> str | None:
        """What the chain loses, None when it is exact."""
        return "; ".join(loss for loss in self.losses if loss is not None) or None

    def then(self, edge: Edge, spec: Spec) -> Route:
        """The chain with another edge at its end, which leads to ``spec``."""
        return Route((*self.edges, edge), spec, (*self.losses, edge.loss(self.spec)))

    def joined(self, other: Route) -> Route:
        """This chain, then another that starts where it ends."""
        return Route((*self.edges, *other.edges), other.spec, (*self.losses, *other.losses))

    def apply(self, weight: QuantizedTensor) -> QuantizedTensor:
        """Send a weight, or a run of its rows, through the chain."""
        for edge in self.edges:
            weight = edge.apply(weight)
        return weight

    def fill(self, weight: QuantizedTensor, parts: Mapping[str, torch.Tensor], where: str) -> None:
        """As ``apply``, into parts that are there already.

        Raises:
            LayoutError: an edge produced something else than these parts.
        """
        last = self.edges[-1] if self.edges else None
        if last is not None and last.fill and all(p.is_contiguous() for p in parts.values()):
            for edge in self.edges[:-1]:
                weight = edge.apply(weight)
            last.fill(weight, parts)
            return
        found = self.apply(weight).parts
        for name, part in parts.items():
            value = found[name]
            if part.shape != value.shape or part.dtype != value.dtype:
                raise LayoutError(
                    where,
                    f"an edge gave {name} as {value.dtype} {tuple(value.shape)}",
                    f"{part.dtype} {tuple(part.shape)} for a run of {weight.shape[0]} rows",
                    "report this: the edge does not follow its layout",
                )
            part.copy_(value)


def find_route(layout: str, spec: Spec, dest: str) -> Route | None:
    """The shortest chain of edges from a weight's layout to ``dest``, exact chains first.

    Args:
        layout: name of the layout the weight has.
        spec: the weight's spec.
        dest: name of the wanted layout.
    """
    return _search(layout, spec, dest, exact=True) or _search(layout, spec, dest, exact=False)


def _search(layout: str, spec: Spec, dest: str, *, exact: bool) -> Route | None:
    queue = deque([(layout, Route((), spec))])
    seen = {layout}
    while queue:
        here, route = queue.popleft()
        if here == dest:
            return route
        for edge in _EDGES.get(here, {}).values():
            spec_after = edge.target_spec(route.spec)
            if edge.dest in seen or spec_after is None or (exact and edge.loss(route.spec)):
                continue
            seen.add(edge.dest)
            queue.append((edge.dest, route.then(edge, spec_after)))
    return None
