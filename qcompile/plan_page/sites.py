"""The sites of a plan as rows that unfold.

Comes in: the records of ``Plan.to_json``. Goes out: HTML.
Always holds: every text of a record is escaped; a row can be read and unfolded without scripts.
"""

from __future__ import annotations

import math
from html import escape
from typing import Any

from qcompile.plan_text import shape_text, size_text

Record = dict[str, Any]

# Key of a row's data attribute, title of its column, whether the column holds numbers.
TITLES = (
    ("site", "site", False),
    ("kind", "kind", False),
    ("spec", "spec", False),
    ("shape", "shape", False),
    ("runs", "kernel", False),
    ("route", "layouts", False),
    ("stored", "stored", True),
    ("packed", "packed", True),
    ("error", "error", True),
)


def measured(verified: Record) -> float:
    """The measured error of a site; infinity where its kernel gave no number."""
    return math.inf if verified["relative_l2"] is None else float(verified["relative_l2"])


def passes(verified: Record) -> bool:
    """Whether a site's error is within what its kernel declares."""
    return measured(verified) <= float(verified["allowed"])


def title(key: str, text: str, number: bool) -> str:
    """The head of a column, a button that sorts."""
    kind = ' class="num"' if number else ""
    return (
        f'<span{kind} role="columnheader" data-key="{key}" aria-sort="none">'
        f'<button type="button">{text}</button></span>'
    )


def row(site: Record, colours: dict[str, str], verified: bool) -> str:
    """A site. ``colours`` holds a style for each kernel."""
    ran = site["runs_as"] != "no kernel"
    route = [site["layout"], *(edge["name"].rpartition(" -> ")[2] for edge in site["edges"])]
    layouts = " \N{RIGHTWARDS ARROW} ".join(route) if ran else site["layout"]
    stored = size_text(site["bytes_before"])
    packed = size_text(site["bytes_after"]) if ran else "-"
    values = {
        **{"site": site["site"], "kind": site["kind"], "spec": site["spec"]},
        **{"shape": str(math.prod(site["shape"])), "runs": site["runs_as"], "route": layouts},
        **{"stored": str(site["bytes_before"]), "packed": str(site["bytes_after"])},
    }
    cells = [
        f"<code>{escape(site['site'])}</code>",
        f"<span>{escape(site['kind'])}</span>",
        f"<span>{escape(site['spec'])}</span>",
        f"<span>{escape(shape_text(tuple(site['shape'])))}</span>",
        f'<span class="runs {"" if ran else "bad"}"><span class="swatch{"" if ran else " none"}" '
        f'style="{colours[site["runs_as"]]}"></span><span>{escape(site["runs_as"])}</span></span>',
        f'<span class="route soft">{escape(layouts)}</span>',
        f'<span class="num"><span class="key">stored </span>{stored}</span>',
        f'<span class="num"><span class="key">packed </span>{packed}</span>',
    ]
    if verified:
        error, style = "", ""
        if site["verified"]:
            values["error"] = str(measured(site["verified"]))
            error = f"{measured(site['verified']):.1e}" if measured(site["verified"]) else "0"
            style = "good" if passes(site["verified"]) else "bad"
        cells.append(f'<span class="num {style}"><span class="key">error </span>{error}</span>')
    data = "".join(f' data-{key}="{escape(value)}"' for key, value in values.items())
    return (
        f'<details class="site"{data}><summary class="row">{"".join(cells)}</summary>'
        f'<div class="more">{_details(site)}</div></details>'
    )


def _details(site: Record) -> str:
    facts = [("weight", site["weight"]), ("from", site["source"])]
    facts += [("stored as", site["facts"])] if site["facts"] else []
    facts += [("activations", site["activations"])] if site["activations"] else []
    for edge in site["edges"]:
        facts.append(("edge", f"{edge['name']}: {edge['error'] or 'exact'}"))
    if site["packed_spec"]:
        facts.append(("packed as", f"{site['packed_layout']} {site['packed_spec']}"))
    if site["requantization_error"] is not None:
        facts.append(("rounding", f"relative L2 error {site['requantization_error']:.1e}"))
    if site["verified"]:
        error = site["verified"]
        facts.append(
            ("verified", f"relative L2 error {measured(error):.2e}, allowed {error['allowed']:.0e}")
        )
    listed = "".join(f"<dt>{key}</dt><dd>{escape(text)}</dd>" for key, text in facts)
    return f'<dl>{listed}</dl><ul aria-label="Verdicts">{_verdicts(site)}</ul>'


def _verdicts(site: Record) -> str:
    lines = []
    for verdict in site["verdicts"]:
        refused = verdict["cost"] is None
        state = "refused" if refused else f"cost {verdict['cost']:.3g}"
        chosen = verdict["kernel"] == site["runs_as"]
        mark = '<b class="good">chosen</b>' if chosen else ""
        lines.append(
            f"<li><code>{escape(verdict['kernel'])}</code> {mark} "
            f'<span class="{"bad" if refused else "soft"}">{state}</span> '
            f"{escape(verdict['text'])}</li>"
        )
    return "".join(lines)
