"""Tables and the facts that stand above them.

Comes in: rows of text. Goes out: lines for a terminal, or Markdown.
Always holds: every table names the command, machine, versions and date it was measured with.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

Row = Sequence[str]


class Urgent(Protocol):
    """Options of any benchmark."""

    @property
    def urgent(self) -> bool:
        """Whether it measured with real-time priority."""


def aligned(rows: Sequence[Row]) -> list[str]:
    """Columns under each other, the first to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if at == 0 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def fitted(rows: Sequence[Row], dispensable: Sequence[str], width: int | None) -> list[str]:
    """As ``aligned``, without as many of the named columns as do not fit into the width."""
    left = list(dispensable)
    shown = list(rows)
    while width is not None and left and max(map(len, aligned(shown))) + 2 > width:
        name = left.pop(0)
        at = shown[0].index(name)
        shown = [(*row[:at], *row[at + 1 :]) for row in shown]
    return aligned(shown)


def piped(rows: Sequence[Row]) -> list[str]:
    """The same as Markdown."""
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return [head, "|---" * len(rows[0]) + "|", *body]


def heading(
    command: str,
    date: str,
    machine: Mapping[str, object],
    versions: Mapping[str, str],
    how: str,
    notes: Iterable[str] = (),
) -> list[str]:
    """What stands above a Markdown table: how it was made, on what, with which versions."""
    memory = machine["memory"]
    size = f", {memory / 2**30:.0f} GiB" if isinstance(memory, int) else ""
    listed = [f"- {note}" for note in notes]
    return [
        f"`{command}`",
        "",
        f"{date}, {machine['processor']}, {machine['cores']} cores{size}; {how}.",
        "",
        ", ".join(f"{name} {version}" for name, version in versions.items()) + ".",
        "",
        *listed,
        *([""] if listed else []),
    ]


def urgent(options: Urgent) -> str:
    """The end of a command line: whether it measured with priority."""
    return " --urgent" if options.urgent else ""


def spread(values: Sequence[float]) -> tuple[str, str]:
    """Median, and from the smallest to the largest; with decimals where figures are small."""
    middle = statistics.median(values)
    digits = next((n for n, least in enumerate((200, 5, 0.2, 0.02)) if middle >= least), 4)
    return f"{middle:.{digits}f}", f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def short(value: float) -> str:
    """Two or three digits that count."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
