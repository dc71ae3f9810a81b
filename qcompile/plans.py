"""The plan: which kernel runs each site, and why.

Comes in: decisions of ``passes/select.py``. Goes out: text, JSON, explanations.
Always holds: a plan is made from headers alone; every kernel of the target appears in every entry
with its verdict; a weight that two sites share is counted once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from qcompile.edge import Route
from qcompile.errors import OptionError, nearest
from qcompile.kernel import Kernel, Numerics
from qcompile.layout import layout_of
from qcompile.plan_table import Paint, no_paint, table
from qcompile.plan_text import entry_record, kernel_totals, shape_text, steps, stored_name
from qcompile.site import Site
from qcompile.target import Target
from qcompile.weight import WeightRef

if TYPE_CHECKING:
    from qcompile.verify import SiteError


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
        emitter: what runs the lowered graph: ``chain``, ``inductor`` or ``eager``.
        notes: facts worth a line, for instance keys that were read and do not matter.
        emulation: how graphs run without the target, empty where they run on it.
        numerics: ``exact``, or ``fast`` where kernels may round activations to 8 bits by groups.
    """

    target: Target
    scheme: str
    source: str
    entries: tuple[Entry, ...]
    floats: tuple[WeightRef, ...] = ()
    emitter: str = "inductor"
    notes: tuple[str, ...] = ()
    emulation: str = ""
    numerics: Numerics = "exact"

    def entry(self, name: str) -> Entry:
        """The entry of a site.

        Args:
            name: its module path, its weight's parameter name, or the tensor's name in the file.

        Raises:
            OptionError: no site has this name; the message has the nearest one.
        """
        for entry in self.entries:
            if name in (entry.site.name, entry.site.weight.name):
                return entry
        for entry in self.entries:
            if stored_name(entry) in (name, f"{name}.weight"):
                return entry
        names = [n for e in self.entries for n in (e.site.name, e.site.weight.name, stored_name(e))]
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
        """Every kernel's verdict on one site as text, the chosen one marked.

        Args:
            name: as for ``entry``, and raises as that does.
        """
        entry = self.entry(name)
        weight = entry.site.weight
        lines = [
            f"{entry.site.name}  {entry.site.kind}  {weight.spec} {shape_text(weight.shape)}"
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
            lines += [f"  edge {name}: {loss or 'exact'}" for name, loss in steps(entry.route)]
            lines.append(
                f"  packed as {entry.layout} {entry.route.spec}: {entry.bytes_after:,} bytes"
            )
        return "\n".join(lines)

    def to_json(self, errors: Iterable[SiteError] = ()) -> str:
        """The whole plan as JSON text, stable under repeated calls.

        Args:
            errors: measured errors of the sites, ``session.verification``.
        """
        found = {(error.site, error.kernel): error for error in errors}
        return json.dumps(
            {
                "target": str(self.target),
                "scheme": self.scheme,
                "source": self.source,
                "emitter": self.emitter,
                "numerics": self.numerics,
                "emulation": self.emulation or None,
                "bytes_before": self.bytes_before,
                "bytes_after": self.bytes_after,
                "bytes_as_halves": self.bytes_as_halves,
                "kernels": [asdict(total) for total in kernel_totals(self.entries)],
                "sites": [
                    entry_record(e, found.get((e.site.name, e.runs_as))) for e in self.entries
                ],
                "floats": [
                    {
                        "name": w.name,
                        "dtype": str(w.spec),
                        "shape": list(w.shape),
                        "bytes": w.nbytes,
                    }
                    for w in self.floats
                ],
                "notes": list(self.notes),
            },
            indent=2,
        )

    def to_html(self, errors: Iterable[SiteError] = ()) -> str:
        """The plan as one web page that loads nothing else; ``errors`` as for ``to_json``."""
        from qcompile.plan_page import page

        return page(self.to_json(errors))

    def text(self, width: int | None = None, paint: Paint = no_paint) -> str:
        """A summary: like sites of consecutive layers share a line. See ``plan_table.table``."""
        return table(self, width, paint)

    def __str__(self) -> str:
        return self.text()
