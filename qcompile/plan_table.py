"""A plan as a table for a terminal of any width.

Comes in: a plan, a width, a painter. Goes out: text.
Always holds: like sites of consecutive layers share a line and stand under their layers; without a
width no column is dropped; nothing is cut off: what does not fit goes to a line of its own; text
from a file is shown with its control characters escaped, so what the painter adds is all there is.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from qcompile.collapse import Group, collapse
from qcompile.plan_text import kernel_totals, refusals, shape_text, size_text
from qcompile.visible import one_line

if TYPE_CHECKING:
    from qcompile.plans import Entry, Plan

Style = Literal["title", "dim", "good", "bad", "warn"]
Paint = Callable[[Style, str], str]


def no_paint(style: Style, text: str) -> str:
    """The text as it is."""
    return text


@dataclass(frozen=True)
class _Row:
    """The cells of sites that share a line."""

    name: str
    kind: str
    spec: str
    shape: str
    runs_as: str
    layout: str
    count: str
    stored: str
    packed: str
    style: Style | None


# What a line shows, from wide to narrow; the first that fits is taken.
_COLUMNS: tuple[tuple[str, ...], ...] = (
    ("name", "kind", "spec", "shape", "runs_as", "layout", "count", "stored", "packed"),
    ("name", "kind", "spec", "shape", "runs_as", "count", "packed"),
    ("name", "spec", "shape", "runs_as", "count", "packed"),
)
_NATURAL = _COLUMNS[1]
# Where none fits, spec and shape stand on a second line.
_FIRST = ("name", "runs_as", "count", "packed")
_TITLES = {"name": "site", "kind": "", "runs_as": "kernel", "count": ""}
_RIGHT = ("count", "stored", "packed")
_NARROWEST = 40


def table(plan: Plan, width: int | None = None, paint: Paint = no_paint) -> str:
    """The plan as text.

    Args:
        plan: the plan.
        width: characters in a line; None for lines as long as they get.
        paint: makes a piece of text bold, red, ...; pieces are padded before.
    """
    limit = None if width is None else max(width, _NARROWEST)
    return "\n".join(
        [
            *_head(plan, limit, paint),
            *_sites(plan.entries, limit, paint),
            "",
            *_totals(plan, limit, paint),
            *_remarks(plan, limit, paint),
        ]
    )


def _head(plan: Plan, limit: int | None, paint: Paint) -> list[str]:
    source = f"plan  {one_line(plan.source)}"
    facts = f"scheme {plan.scheme}  target {plan.target}  emitter {plan.emitter}"
    facts += f"  numerics {plan.numerics}" if plan.numerics != "exact" else ""
    if limit is None or len(f"{source}  {facts}") <= limit:
        return [f"{paint('title', source)}  {facts}"]
    return [paint("title", source), *wrapped("  ", "  ", facts, limit)]


# **** sites ****


def _sites(entries: Iterable[Entry], limit: int | None, paint: Paint) -> list[str]:
    sections = _sections(collapse(entries))
    rows = [[_row(group) for group in groups] for _, groups in sections]
    every = [row for section in rows for row in section]
    if not every:
        return []
    columns = _fitting(every, limit)
    widths = {column: _width(every, column) for column in columns or _FIRST}
    lines = [paint("dim", _cells(_TITLES, widths))]
    for (head, groups), section in zip(sections, rows, strict=True):
        if head:
            layers = len({entry.site.name for entry in groups[0].entries})
            many = paint("dim", f"  {layers} layers") if layers > 1 else ""
            lines.append(f"  {one_line(head)}{many}")
        for row in section:
            lines.append(_line(row, widths, paint))
            if not columns:
                lines.append(_second(row, widths["name"] + 2, limit, paint))
    return lines


def _sections(groups: Iterable[Group]) -> list[tuple[str, list[Group]]]:
    """Groups under the layers they share; one without layers stands alone."""
    found: list[tuple[str, list[Group]]] = []
    places: dict[str, list[Group]] = {}
    for group in groups:
        if group.head and group.head in places:
            places[group.head].append(group)
            continue
        found.append((group.head, [group]))
        places[group.head] = found[-1][1]
    return found


def _row(group: Group) -> _Row:
    entry = group.entries[0]
    weight, route = entry.site.weight, entry.route
    after = sum(e.bytes_after for e in group.entries) // len(group.entries)
    style: Style | None = "warn" if entry.dequantize or entry.requantized else None
    packed_as = f"{entry.layout} {route.spec}" if route else entry.layout
    return _Row(
        name=("    " if group.head else "  ") + one_line(group.tail if group.head else group.name),
        kind=entry.site.kind,
        spec=str(weight.spec),
        shape=shape_text(weight.shape),
        runs_as=entry.runs_as,
        layout="-" if entry.runs_as == "no kernel" else packed_as,
        count=f"{len(group.entries)} x" if len(group.entries) > 1 else "",
        stored=size_text(weight.nbytes),
        packed=size_text(after) if after else "-",
        style="bad" if entry.runs_as == "no kernel" else style,
    )


def _width(rows: Sequence[_Row], column: str) -> int:
    return max(len(_TITLES.get(column, column)), *(len(getattr(row, column)) for row in rows))


def _fitting(rows: Sequence[_Row], limit: int | None) -> tuple[str, ...] | None:
    """The most columns that fit, or None when a site needs two lines."""
    if limit is None:
        return _NATURAL
    for columns in _COLUMNS:
        if sum(_width(rows, column) + 2 for column in columns) - 2 <= limit:
            return columns
    return None


def _line(row: _Row, widths: dict[str, int], paint: Paint) -> str:
    texts = {column: str(getattr(row, column)) for column in widths}
    return _cells(texts, widths, row.style, paint)


def _cells(
    texts: dict[str, str],
    widths: dict[str, int],
    style: Style | None = None,
    paint: Paint = no_paint,
) -> str:
    cells = []
    for column, wide in widths.items():
        text = texts.get(column, column)
        text = f"  {text}" if column == "name" and text == "site" else text
        text = text.rjust(wide) if column in _RIGHT else text.ljust(wide)
        cells.append(paint(style, text) if style and column == "runs_as" else text)
    return "  ".join(cells).rstrip()


def _second(row: _Row, indent: int, limit: int | None, paint: Paint) -> str:
    """What the weight is, under the kernel where it fits."""
    text = f"{row.spec} {row.shape}"
    room = indent if limit is None else max(min(indent, limit - len(text)), 6)
    return " " * room + paint("dim", text)


# **** totals and remarks ****


def _totals(plan: Plan, limit: int | None, paint: Paint) -> list[str]:
    """Sites and bytes of each kernel, of all sites, and of float tensors."""
    rows = [("kernel", "sites", "stored", "packed", "")]
    for total in kernel_totals(plan.entries):
        shared = f"and {size_text(total.shared)} shared with others" if total.shared else ""
        packed = size_text(total.packed) if total.name != "no kernel" else "-"
        rows.append((total.name, str(total.sites), size_text(total.stored), packed, shared))
    rows.append(("all sites", str(len(plan.entries)), size_text(plan.bytes_before), *_all(plan)))
    if plan.floats:
        floats = size_text(sum(weight.nbytes for weight in plan.floats))
        rows.append(("float tensors", str(len(plan.floats)), floats, floats, ""))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines: list[str] = []
    for name, *cells, remark in rows:
        numbers = [cell.rjust(wide) for cell, wide in zip(cells, widths[1:], strict=True)]
        line = "  ".join(["", name.ljust(widths[0]), *numbers])
        fits = limit is None or len(f"{line}  {remark}") <= limit
        lines += [f"{line}  {remark}".rstrip()] if fits else [line, f"    {remark}"]
    return [paint("dim", lines[0]), *lines[1:]]


def _all(plan: Plan) -> tuple[str, str]:
    if plan.refused:
        return "-", ""
    halves = plan.bytes_as_halves
    share = f"{plan.bytes_after / halves:.0%} of 16-bit floats" if halves else ""
    return size_text(plan.bytes_after), share


def _remarks(plan: Plan, limit: int | None, paint: Paint) -> list[str]:
    lines: list[str] = []
    if plan.refused:
        refused = f"  {len(plan.refused)} of {len(plan.entries)} sites have no kernel:"
        lines.append(paint("bad", refused))
        for reason in refusals(plan.refused, plan.target):
            lines += wrapped("    ", "      ", one_line(reason), limit)
    lines += _rounded(plan)
    if plan.emulation:
        lines += wrapped("  ", "    ", plan.emulation, limit)
    for note in plan.notes:
        lines += wrapped("  ", "    ", f"note: {one_line(note)}", limit)
    return lines


def _rounded(plan: Plan) -> list[str]:
    """A line on the weights that the policy rounds."""
    rounded = [entry for entry in plan.entries if entry.requantized]
    if not rounded:
        return []
    errors = [entry.error for entry in rounded if entry.error is not None]
    worst = f"worst relative L2 error {max(errors):.1e}" if errors else "measured when packed"
    return [f"  {len(rounded)} sites requantized to 8 bits: {worst}"]


def wrapped(first: str, rest: str, text: str, limit: int | None) -> list[str]:
    """A text with an indent for its first line and one for the rest, cut at a width."""
    if limit is None:
        return [first + text]
    return textwrap.wrap(
        text, limit, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
    )
