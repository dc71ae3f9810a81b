"""The plan: which kernel runs each site, and why.

Comes in: decisions of ``passes/select.py``. Goes out: text, JSON, explanations.
Always holds: a plan is made from headers alone; every kernel of the target appears in every entry
with its verdict; a weight that two sites share is counted once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from qcompile.collapse import Group, collapse
from qcompile.edge import Route
from qcompile.errors import OptionError, nearest
from qcompile.kernel import Kernel
from qcompile.layout import layout_of
from qcompile.site import Site
from qcompile.target import Target
from qcompile.weight import WeightRef


@dataclass(frozen=True)
class Verdict:
    """What one kernel said about one site.

    Attributes:
        kernel: the kernel's name.
        cost: the cost it asks, None when it refused.
        text: its note or its reason.
    """

    kernel: str
    cost: float | None
    text: str


@dataclass(frozen=True)
class Entry:
    """The decision for one site.

    Attributes:
        site: the place in the model.
        verdicts: every kernel of the target, in the order asked.
        kernel: the chosen kernel, None when none accepts.
        route: the edges to the kernel's layout (empty when it takes the stored layout).
        dequantize: the site runs as a float op on a materialized weight, by policy.
        float_bytes: bytes of that float weight, 0 otherwise.
        requantized: the weight is rounded for the kernel, by policy; the first edge does it.
        error: relative L2 error of the rounding, once the weight is packed.
    """

    site: Site
    verdicts: tuple[Verdict, ...]
    kernel: Kernel | None
    route: Route | None
    dequantize: bool = False
    float_bytes: int = 0
    requantized: bool = False
    error: float | None = None

    @property
    def layout(self) -> str:
        """Name of the layout the weight ends in."""
        if self.dequantize:
            return "float"
        if self.route is None or not self.route.edges:
            return self.site.weight.layout
        return self.route.edges[-1].dest

    @property
    def bytes_after(self) -> int:
        """Bytes of the weight in that layout."""
        if self.dequantize or self.route is None:
            return self.float_bytes
        return layout_of(self.layout).nbytes(self.route.spec, self.site.weight.shape)

    @property
    def runs_as(self) -> str:
        """The kernel's name, or what happens instead."""
        if self.kernel is not None:
            return self.kernel.name + (", requantized" if self.requantized else "")
        return "dequantized" if self.dequantize else "no kernel"


@dataclass(frozen=True)
class Plan:
    """Decisions for all sites of a model on a target.

    Attributes:
        target: the device planned for.
        scheme: how the checkpoint stores weights.
        source: the checkpoint.
        entries: one for each site, in model order.
        floats: weights that the checkpoint stores as plain numbers and that stay so.
        emitter: what runs the lowered graph: ``inductor`` or ``eager``.
        notes: facts worth a line, for instance keys that were read and do not matter.
        emulation: how graphs run without the target, empty where they run on it.
    """

    target: Target
    scheme: str
    source: str
    entries: tuple[Entry, ...]
    floats: tuple[WeightRef, ...] = ()
    emitter: str = "inductor"
    notes: tuple[str, ...] = ()
    emulation: str = ""

    def entry(self, name: str) -> Entry:
        """The entry of a site, by its module path or its weight's name."""
        for entry in self.entries:
            if name in (entry.site.name, entry.site.weight.name):
                return entry
        for entry in self.entries:
            if _stored(entry) in (name, f"{name}.weight"):
                return entry
        names = [n for e in self.entries for n in (e.site.name, e.site.weight.name, _stored(e))]
        raise OptionError(
            f"plan of {self.source}",
            f"no site {name!r}",
            "the name of a site, of its weight or of the tensor in the file",
            f"print the plan for the names{nearest(name, names)}",
        )

    @property
    def refused(self) -> tuple[Entry, ...]:
        """The entries that nothing runs."""
        return tuple(e for e in self.entries if e.kernel is None and not e.dequantize)

    @property
    def bytes_before(self) -> int:
        """Bytes of the sites' weights in the checkpoint."""
        return sum(
            w.nbytes for w in {e.site.weight.name: e.site.weight for e in self.entries}.values()
        )

    @property
    def bytes_after(self) -> int:
        """Bytes of the sites' weights in the layouts of their kernels."""
        return sum({(e.site.weight.name, e.layout): e.bytes_after for e in self.entries}.values())

    @property
    def bytes_as_halves(self) -> int:
        """Bytes of the sites' weights if all were decoded to floats of 16 bits."""
        shapes = {e.site.weight.name: e.site.weight.shape for e in self.entries}
        return sum(2 * math.prod(shape) for shape in shapes.values())

    def measured(self, weight: str, error: float) -> Plan:
        """The plan with the measured error of a requantized weight."""
        entries = tuple(
            replace(e, error=error) if e.requantized and e.site.weight.name == weight else e
            for e in self.entries
        )
        return replace(self, entries=entries)

    def explain(self, name: str) -> str:
        """Every kernel's verdict on one site, the chosen one marked."""
        entry = self.entry(name)
        weight = entry.site.weight
        lines = [
            f"{entry.site.name}  {entry.site.kind}  {weight.spec} {_shape(weight.shape)}"
            f"  {weight.nbytes:,} bytes",
            f"  from {weight.source}",
            *([f"  stored as {weight.facts}"] if weight.facts else []),
            *([f"  activations {weight.activations}"] if weight.activations else []),
        ]
        for verdict in entry.verdicts:
            # The verdicts are on the stored weight, which a requantized entry does not run on.
            taken = None if entry.requantized else entry.kernel
            chosen = taken is not None and verdict.kernel == taken.name
            state = "refused" if verdict.cost is None else f"cost {verdict.cost:.3g}"
            lines.append(f"  [{'x' if chosen else ' '}] {verdict.kernel}  {state}  {verdict.text}")
        if not entry.verdicts:
            lines.append(f"  the backend {self.target.kind} has no kernel yet")
        if entry.dequantize:
            lines.append(f"  dequantized by policy: {entry.float_bytes:,} bytes of floats")
        if entry.requantized and entry.kernel is not None:
            found = "measured when packed" if entry.error is None else f"{entry.error:.1e}"
            lines.append(
                f"  requantized by policy for {entry.kernel.name}: relative L2 error {found}"
            )
        if entry.route is not None:
            lines += [f"  edge {name}: {loss or 'exact'}" for name, loss in _steps(entry.route)]
            lines.append(
                f"  packed as {entry.layout} {entry.route.spec}: {entry.bytes_after:,} bytes"
            )
        return "\n".join(lines)

    def to_json(self) -> str:
        """The whole plan as JSON text, stable under repeated calls."""
        return json.dumps(
            {
                "target": str(self.target),
                "scheme": self.scheme,
                "source": self.source,
                "emitter": self.emitter,
                "emulation": self.emulation or None,
                "bytes_before": self.bytes_before,
                "bytes_after": self.bytes_after,
                "bytes_as_halves": self.bytes_as_halves,
                "sites": [_entry_json(entry) for entry in self.entries],
                "floats": [
                    {"name": w.name, "dtype": str(w.spec), "shape": list(w.shape)}
                    for w in self.floats
                ],
                "notes": list(self.notes),
            },
            indent=2,
        )

    def __str__(self) -> str:
        """A summary: like sites of consecutive layers share a line."""
        head = [
            f"plan  {self.source}  scheme {self.scheme}  target {self.target}"
            f"  emitter {self.emitter}"
        ]
        rows = [_summary(group) for group in collapse(self.entries)]
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(4)]
        body = [
            "  "
            + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False))
            + f"  {row[4]}"
            for row in rows
        ]
        tail = [
            f"  {len(self.entries)} sites, {mib(self.bytes_before)} stored"
            + (f", {self._resident()}" if not self.refused else "")
            + f"; {len(self.floats)} float tensors, {mib(sum(w.nbytes for w in self.floats))}"
        ]
        if self.refused:
            tail.append(f"  {len(self.refused)} of {len(self.entries)} sites have no kernel:")
            tail += [f"    {line}" for line in refusals(self.refused, self.target)]
        tail += self._rounded()
        tail += [f"  {self.emulation}"] if self.emulation else []
        tail += [f"  note: {note}" for note in self.notes]
        return "\n".join(head + body + tail)

    def _resident(self) -> str:
        halves = self.bytes_as_halves
        share = f" ({self.bytes_after / halves:.0%} of 16-bit floats)" if halves else ""
        return f"{mib(self.bytes_after)} packed{share}"

    def _rounded(self) -> list[str]:
        """A line on the weights that the policy rounds."""
        rounded = [entry for entry in self.entries if entry.requantized]
        if not rounded:
            return []
        errors = [entry.error for entry in rounded if entry.error is not None]
        worst = f"worst relative L2 error {max(errors):.1e}" if errors else "measured when packed"
        return [f"  {len(rounded)} sites requantized to 8 bits: {worst}"]


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


def _steps(route: Route) -> list[tuple[str, str | None]]:
    """The edges of a route by name, each with what it loses."""
    return [(edge.name, loss) for edge, loss in zip(route.edges, route.losses, strict=True)]


def _stored(entry: Entry) -> str:
    """Name of the weight in its file."""
    return entry.site.weight.source.rpartition(": ")[2]


def _summary(group: Group) -> tuple[str, str, str, str, str]:
    entry = group.entries[0]
    weight = entry.site.weight
    after = sum(e.bytes_after for e in group.entries)
    count = f"{len(group.entries)} x " if len(group.entries) > 1 else ""
    return (
        group.name,
        entry.site.kind,
        f"{weight.spec} {_shape(weight.shape)}",
        entry.runs_as,
        count + (mib(after // len(group.entries)) if after else mib(weight.nbytes)),
    )


def _shape(shape: tuple[int, ...]) -> str:
    return "[" + " x ".join(map(str, shape)) + "]"


def _entry_json(entry: Entry) -> dict[str, object]:
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
        "edges": [{"name": n, "error": loss} for n, loss in _steps(route)] if route else [],
        "bytes_before": weight.nbytes,
        "bytes_after": entry.bytes_after,
        "verdicts": [{"kernel": v.kernel, "cost": v.cost, "text": v.text} for v in entry.verdicts],
    }
