"""Sites that differ only in their layer share a line of a plan.

Comes in: a plan's entries. Goes out: groups of them, in the order of first appearance.
Always holds: entries of a group have one kind of site, spec, shape, kernel and layout, and every
entry is in one group.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qcompile.plans import Entry

_LAYER = re.compile(r"(?<![^.])\d+(?![^.])")  # a whole component of a path


@dataclass(frozen=True)
class Group:
    """Sites that differ only in their layer."""

    name: str
    entries: tuple[Entry, ...]


def collapse(entries: Iterable[Entry]) -> list[Group]:
    """Group like sites over layers, keeping the order of first appearance."""
    groups: dict[tuple[object, ...], list[Entry]] = {}
    for entry in entries:
        weight = entry.site.weight
        stem = _LAYER.sub("*", entry.site.name, count=1)
        key = (stem, entry.site.kind, str(weight.spec), weight.shape, entry.runs_as, entry.layout)
        groups.setdefault(key, []).append(entry)
    return [Group(_ranged(str(key[0]), found), tuple(found)) for key, found in groups.items()]


def _ranged(stem: str, entries: list[Entry]) -> str:
    numbers = sorted(int(m.group()) for e in entries if (m := _LAYER.search(e.site.name)))
    return stem.replace("*", ranges(numbers), 1) if numbers else stem


def ranges(numbers: list[int]) -> str:
    """Sorted numbers as ranges.

    >>> ranges([0, 1, 2, 5, 7, 8])
    '0-2,5,7-8'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)
