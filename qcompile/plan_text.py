"""A plan's entries as text and as records.

Comes in: entries. Goes out: lines and plain values. Always holds: nothing is decided here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qcompile.edge import Route
from qcompile.target import Target

if TYPE_CHECKING:
    from qcompile.plans import Entry, Verdict
    from qcompile.verify import SiteError


def mib(count: int) -> str:
    """Bytes as MiB with one decimal."""
    return f"{count / 2**20:.1f} MiB"


def size_text(count: int) -> str:
    """Bytes in the largest unit of which there is one.

    >>> size_text(1000), size_text(20 << 10), size_text(3 << 29)
    ('1000 B', '20.0 KiB', '1.5 GiB')
    """
    if count < 1 << 10:
        return f"{count} B"
    for unit, size in (("KiB", 1 << 10), ("MiB", 1 << 20)):
        if count < 1024 * size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 2**30:.1f} GiB"


@dataclass(frozen=True)
class KernelTotal:
    """What runs as one kernel.

    Attributes:
        name: the kernel, or what happens instead of one.
        sites: how many sites.
        stored: bytes of their weights in the checkpoint, of weights not counted before.
        packed: the same in the kernel's layout.
        shared: packed bytes of weights that another kernel's total counts already.
    """

    name: str
    sites: int
    stored: int
    packed: int
    shared: int


def kernel_totals(entries: Iterable[Entry]) -> list[KernelTotal]:
    """Totals by kernel; a weight that several sites share is counted where it is met first."""
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.runs_as, []).append(entry)
    stored: dict[str, int] = {}
    packed: dict[tuple[str, str], int] = {}
    totals = []
    for name, found in groups.items():
        before = {e.site.weight.name: e.site.weight.nbytes for e in found}
        after = {(e.site.weight.name, e.layout): e.bytes_after for e in found}
        fresh = sum(size for key, size in after.items() if key not in packed)
        totals.append(
            KernelTotal(
                name,
                len(found),
                sum(size for key, size in before.items() if key not in stored),
                fresh,
                sum(after.values()) - fresh,
            )
        )
        stored |= before
        packed |= after
    return totals


def refusals(entries: Iterable[Entry], target: Target) -> list[str]:
    """The distinct reasons why sites have no kernel, with how many sites each concerns.

    Kernels that refuse as many sites for the same reason share a line.
    """
    counts: dict[str, dict[str, int]] = {}
    for entry in entries:
        reasons = [(verdict.kernel, _reason(verdict)) for verdict in entry.verdicts] or [
            ("", f"the backend {target.kind} has no kernel for {entry.site.kind} sites yet")
        ]
        for kernel, reason in reasons:
            kernels = counts.setdefault(reason, {})
            kernels[kernel] = kernels.get(kernel, 0) + 1
    lines = []
    for reason, kernels in counts.items():
        for count in dict.fromkeys(kernels.values()):
            alike = ", ".join(name for name, found in kernels.items() if found == count)
            lines.append(f"{count} x {alike}{': ' if alike else ''}{reason}")
    return lines


def _reason(verdict: Verdict) -> str:
    if verdict.cost is None:
        return verdict.text
    # Accepted alone, refused in company: one packed copy has to serve all sites of a weight.
    return "accepts, but another site of the same weight takes no such layout"


def steps(route: Route) -> list[tuple[str, str | None]]:
    """The edges of a route by name, each with what it loses."""
    return [(edge.name, loss) for edge, loss in zip(route.edges, route.losses, strict=True)]


def stored_name(entry: Entry) -> str:
    """Name of the weight in its file."""
    return entry.site.weight.source.rpartition(": ")[2]


def shape_text(shape: tuple[int, ...]) -> str:
    """A shape as ``[N x K]``."""
    return "[" + " x ".join(map(str, shape)) + "]"


def entry_record(entry: Entry, error: SiteError | None = None) -> dict[str, object]:
    """An entry as values that JSON has, with the measured error of its site."""
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
        "requantized": entry.requantized,
        "requantization_error": entry.error,
        "packed_layout": None if entry.runs_as == "no kernel" else entry.layout,
        "packed_spec": str(route.spec) if route else None,
        "edges": [{"name": n, "error": loss} for n, loss in steps(route)] if route else [],
        "bytes_before": weight.nbytes,
        "bytes_after": entry.bytes_after,
        "verified": _measured(error) if error else None,
        "verdicts": [{"kernel": v.kernel, "cost": v.cost, "text": v.text} for v in entry.verdicts],
    }


def _measured(error: SiteError) -> dict[str, object]:
    # JSON knows neither infinity nor NaN.
    found = error.relative_l2 if math.isfinite(error.relative_l2) else None
    return {"relative_l2": found, "allowed": error.allowed}
