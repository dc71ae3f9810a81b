"""A plan as one web page.

Comes in: the text of ``Plan.to_json``. Goes out: the text of an HTML page.
Always holds: the page is whole: it loads nothing, and a policy in its head forbids it to; every
text of the plan is escaped, and the only script that runs is the one whose hash the policy names;
without scripts everything can still be read.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from pathlib import PurePath
from string import Template

from qcompile.plan_page.graph import flow, layer_map
from qcompile.plan_page.sites import TITLES, Record, measured, passes, row, title
from qcompile.plan_text import shape_text, size_text

_ALONE = "accepts, but another site of the same weight takes no such layout"


def page(plan_json: str) -> str:
    """The page of a plan, from the text of its JSON."""
    plan: Record = json.loads(plan_json)
    colours = _colours(plan["kernels"])
    verified = any(site["verified"] for site in plan["sites"])
    titles = TITLES if verified else TITLES[:-1]
    names = [kernel["name"] for kernel in plan["kernels"]]
    script = _asset("page.js")
    return Template(_asset("page.html")).substitute(
        policy=_policy(script),
        title=escape(f"qcompile plan: {PurePath(plan['source']).name}"),
        name=escape(PurePath(plan["source"]).name),
        source=_folder(plan["source"]),
        pills=_pills(plan),
        memory=_memory(plan, colours),
        kernels=_kernels(plan, colours),
        refused=_refused(plan["sites"], plan["target"]),
        flow=flow(plan["sites"], colours),
        map=layer_map(plan["sites"]),
        options="".join(f"<option>{escape(name)}</option>" for name in names),
        orders="".join(f'<option value="{key}">by {text}</option>' for key, text, _ in titles),
        error_column="4.4rem" if verified else "",
        titles="".join(title(*each) for each in titles),
        sites="\n".join(row(site, colours, verified) for site in plan["sites"]),
        floats=_floats(plan["floats"]),
        notes=_notes(plan),
        version=escape(_version()),
        measured=" and measured on the stored bytes" if verified else " alone",
        script=script,
    )


def _folder(source: str) -> str:
    """The whole path, where it says more than the name."""
    return "" if PurePath(source).name == source else f'<p class="mono">{escape(source)}</p>\n'


def _asset(name: str) -> str:
    return files("qcompile.plan_page").joinpath(name).read_text(encoding="utf-8")


def _version() -> str:
    import qcompile  # the face is imported by nothing below it until a page is made

    return qcompile.__version__


def _policy(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed = f"script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:"
    return f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"


def _colours(kernels: Sequence[Record]) -> dict[str, str]:
    """What the style sheet calls the colour of each kernel."""
    names = [kernel["name"] for kernel in kernels]
    found = {name: f"--c: var(--k{number % 8})" for number, name in enumerate(names)}
    return found | {"no kernel": "--c: var(--bad)"}


# **** head ****


def _pills(plan: Record) -> str:
    facts = [
        ("", f"scheme {plan['scheme']}"),
        ("", f"target {plan['target']}"),
        ("", f"emitter {plan['emitter']}"),
    ]
    if plan.get("numerics", "exact") != "exact":
        facts.append(("warn", f"numerics {plan['numerics']}"))
    sites = plan["sites"]
    refused = sum(site["runs_as"] == "no kernel" for site in sites)
    floats = sum(site["runs_as"] == "dequantized" for site in sites)
    rounded = sum(site["requantized"] for site in sites)
    facts += [("bad", f"{refused} of {len(sites)} sites have no kernel")] if refused else []
    facts += [("good", f"all {len(sites)} sites have a kernel")] if not refused + floats else []
    facts += [("warn", f"{floats} sites dequantized")] if floats else []
    facts += [("warn", f"{rounded} sites requantized")] if rounded else []
    facts += _verified(sites)
    facts += [("warn", plan["emulation"])] if plan["emulation"] else []
    return "".join(f'<span class="pill {kind}">{escape(text)}</span>' for kind, text in facts)


def _verified(sites: Sequence[Record]) -> list[tuple[str, str]]:
    found = [site["verified"] for site in sites if site["verified"]]
    if not found:
        return []
    wrong = sum(not passes(error) for error in found)
    worst = max(map(measured, found))
    text = f"verified {len(found)} sites, worst error {worst:.1e}"
    return [("bad", f"{text}, {wrong} beyond what is allowed") if wrong else ("good", text)]


# **** memory ****


def _memory(plan: Record, colours: dict[str, str]) -> str:
    floats = sum(weight["bytes"] for weight in plan["floats"])
    kernels = plan["kernels"]
    stored = [(k["name"], k["stored"]) for k in kernels]
    packed = [(k["name"], k["packed"]) for k in kernels]
    bars = [("in the checkpoint", stored)]
    if not any(site["runs_as"] == "no kernel" for site in plan["sites"]):
        bars.append(("packed for the kernels", packed))
    bars.append(("as 16-bit floats", [("as 16-bit floats", plan["bytes_as_halves"])]))
    most = max(sum(size for _, size in parts) for _, parts in bars) + floats
    lines = []
    for label, parts in bars:
        total = sum(size for _, size in parts) + floats
        pieces = [*parts, ("float tensors", floats)]
        lines.append(
            f'<div><span class="label">{label}</span>'
            f'<div class="bar">{_pieces(pieces, most, colours)}</div>'
            f'<span class="num">{size_text(total)}</span></div>'
        )
    return f'<div class="bars">{"".join(lines)}</div>'


def _pieces(parts: Iterable[tuple[str, int]], most: int, colours: dict[str, str]) -> str:
    return "".join(
        f'<span{" class=none" if name == "no kernel" else ""} style="width:{100 * size / most:.3f}%'
        f';{colours.get(name, "--c: var(--floats)")};background-color:var(--c)" '
        f'title="{escape(name)}: {size_text(size)}"></span>'
        for name, size in parts
        if size
    )


def _kernels(plan: Record, colours: dict[str, str]) -> str:
    rows = [
        _kernel(
            f'<span class="swatch{"" if k["name"] != "no kernel" else " none"}" '
            f'style="{colours[k["name"]]}"></span><code>{escape(k["name"])}</code>',
            k["sites"],
            k["stored"],
            k["packed"] if k["name"] != "no kernel" else None,
            f"and {size_text(k['shared'])} shared with others" if k["shared"] else "",
        )
        for k in plan["kernels"]
    ]
    if plan["floats"]:
        size = sum(weight["bytes"] for weight in plan["floats"])
        name = '<span class="swatch" style="--c: var(--floats)"></span>float tensors'
        rows.append(_kernel(name, len(plan["floats"]), size, size, ""))
    heads = "".join(f'<th class="num">{title}</th>' for title in ("sites", "stored", "packed"))
    return (
        f'<table class="kernels"><thead><tr><th>kernel</th>{heads}<th></th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
    )


def _kernel(name: str, sites: int, stored: int, packed: int | None, remark: str) -> str:
    after = "-" if packed is None else size_text(packed)
    return (
        f'<tr><td>{name}</td><td class="num">{sites}<span class="key"> sites</span></td>'
        f'<td class="num"><span class="key">stored </span>{size_text(stored)}</td>'
        f'<td class="num"><span class="key">packed </span>{after}</td><td>{remark}</td></tr>'
    )


def _refused(sites: Sequence[Record], target: str) -> str:
    """The reasons why sites have no kernel, folded by kernel."""
    kernels: dict[str, dict[str, list[str]]] = {}
    for site in sites:
        if site["runs_as"] != "no kernel":
            continue
        missing = {"kernel": target, "cost": None, "text": f"no kernel for {site['kind']} sites"}
        for verdict in site["verdicts"] or [missing]:
            text = verdict["text"] if verdict["cost"] is None else _ALONE
            kernels.setdefault(verdict["kernel"], {}).setdefault(text, []).append(site["site"])
    if not kernels:
        return ""
    folded = "".join(_refusals(kernel, reasons) for kernel, reasons in kernels.items())
    return (
        '<section aria-label="Refusals"><h2 class="bad">Why sites have no kernel</h2>'
        f'<ul class="plain">{folded}</ul></section>'
    )


def _refusals(kernel: str, reasons: dict[str, list[str]]) -> str:
    lines = "".join(
        f"<li><details><summary>{len(names)} x {escape(reason)}</summary>"
        f'<code class="soft">{escape(", ".join(names))}</code></details></li>'
        for reason, names in reasons.items()
    )
    count = sum(map(len, reasons.values()))
    many = f"{len(reasons)} reasons" if len(reasons) > 1 else "one reason"
    return (
        f"<li><details><summary><code>{escape(kernel)}</code> refuses {count} sites, "
        f'<span class="soft">{many}</span></summary><ul class="plain">{lines}</ul></details></li>'
    )


# **** the rest ****


def _floats(floats: Sequence[Record]) -> str:
    if not floats:
        return ""
    lines = "".join(
        f'<li><code>{escape(weight["name"])}</code> <span class="soft">{escape(weight["dtype"])} '
        f"{escape(shape_text(tuple(weight['shape'])))} {size_text(weight['bytes'])}</span></li>"
        for weight in floats
    )
    return (
        f'<section><details class="fold"><summary>{len(floats)} float tensors</summary>'
        f'<ul class="plain">{lines}</ul></details></section>'
    )


def _notes(plan: Record) -> str:
    lines = "".join(f"<li>{escape(note)}</li>" for note in plan["notes"])
    return f'<section><h2>Notes</h2><ul class="plain">{lines}</ul></section>' if lines else ""
