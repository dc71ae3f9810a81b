"""A plan's entries as text and as records.

Comes in: entries. Goes out: lines and plain values. Always holds: nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from qcompile.collapse import Group
from qcompile.edge import Route
from qcompile.target import Target

if TYPE_CHECKING:
    from qcompile.plans import Entry, Verdict


def mib(count: int) -> str:
    """Bytes as MiB with one decimal."""
    return f"{count / 2**20:.1f} MiB"


def refusals(entries: Iterable[Entry], target: Target) -> list[str]:
    """The distinct reasons why sites have no kernel, with how many sites each concerns."""
    counts: dict[str, int] = {}
    for entry in entries:
        reasons = [_reason(verdict) for verdict in entry.verdicts] or [
            f"the backend {target.kind} has no kernel for {entry.site.kind} sites yet"
        ]
        for reason in reasons:
            counts[reason] = counts.get(reason, 0) + 1
    return [f"{count} x {reason}" for reason, count in counts.items()]


def _reason(verdict: Verdict) -> str:
    if verdict.cost is None:
        return f"{verdict.kernel}: {verdict.text}"
    # Accepted alone, refused in company: one packed copy has to serve all sites of a weight.
    return f"{verdict.kernel}: accepts, but another site of the same weight takes no such layout"


def steps(route: Route) -> list[tuple[str, str | None]]:
    """The edges of a route by name, each with what it loses."""
    return [(edge.name, loss) for edge, loss in zip(route.edges, route.losses, strict=True)]


def stored_name(entry: Entry) -> str:
    """Name of the weight in its file."""
    return entry.site.weight.source.rpartition(": ")[2]


def summary_row(group: Group) -> tuple[str, str, str, str, str]:
    """Name, kind, weight, what runs it and bytes of sites that share a line."""
    entry = group.entries[0]
    weight = entry.site.weight
    after = sum(e.bytes_after for e in group.entries)
    count = f"{len(group.entries)} x " if len(group.entries) > 1 else ""
    return (
        group.name,
        entry.site.kind,
        f"{weight.spec} {shape_text(weight.shape)}",
        entry.runs_as,
        count + (mib(after // len(group.entries)) if after else mib(weight.nbytes)),
    )


def shape_text(shape: tuple[int, ...]) -> str:
    """A shape as ``[N x K]``."""
    return "[" + " x ".join(map(str, shape)) + "]"


def entry_record(entry: Entry) -> dict[str, object]:
    """An entry as values that JSON has."""
    weight, route = entry.site.weight, entry.route
    return {
        "site": entry.site.name,
        "kind": entry.site.kind,
        "weight": weight.name,
        "source": weight.source,
        "spec": str(weight.spec),
        "facts": weight.facts,
        "activations": str(weight.activations) if weight.activations else None,
        "layout": weight.layout,
        "shape": list(weight.shape),
        "runs_as": entry.runs_as,
        "requantization_error": entry.error,
        "packed_layout": None if entry.runs_as == "no kernel" else entry.layout,
        "packed_spec": str(route.spec) if route else None,
        "edges": [{"name": n, "error": loss} for n, loss in steps(route)] if route else [],
        "bytes_before": weight.nbytes,
        "bytes_after": entry.bytes_after,
        "verdicts": [{"kernel": v.kernel, "cost": v.cost, "text": v.text} for v in entry.verdicts],
    }
