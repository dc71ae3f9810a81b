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

LAYER = re.compile(r"(?<![^.])\d+(?![^.])")  # a whole component of a path


@dataclass(frozen=True)
class Group:
    """Sites that differ only in their layer.

    Attributes:
        name: their names in one: ``model.layers.0-17.mlp.up_proj``.
        entries: one for each site.
        head: the name up to the layers, empty where there are none: ``model.layers.0-17``.
    """

    name: str
    entries: tuple[Entry, ...]
    head: str = ""

    @property
    def tail(self) -> str:
        """The name behind the head."""
        return self.name[len(self.head) :].removeprefix(".")


def collapse(entries: Iterable[Entry]) -> list[Group]:
    """Group like sites over layers, keeping the order of first appearance."""
    groups: dict[tuple[object, ...], list[Entry]] = {}
    for entry in entries:
        weight = entry.site.weight
        stem = LAYER.sub("*", entry.site.name, count=1)
        key = (stem, entry.site.kind, str(weight.spec), weight.shape, entry.runs_as, entry.layout)
        groups.setdefault(key, []).append(entry)
    return [_group(str(key[0]), tuple(found)) for key, found in groups.items()]


def _group(stem: str, entries: tuple[Entry, ...]) -> Group:
    numbers = sorted(int(m.group()) for e in entries if (m := LAYER.search(e.site.name)))
    if not numbers:
        return Group(stem, entries)
    before, _, behind = stem.partition("*")
    head = before + ranges(numbers)
    # A layer that is a site itself has nothing behind its number to stand under the head.
    return Group(head + behind, entries, head if behind else "")


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
