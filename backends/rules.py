"""Rules as data, for every backend whose operators have demands.

Comes in: a call of an operator. Goes out: what is wrong with it, or None.
Always holds: a rule says in one sentence what must hold, where that is written, and what was found
instead; rules are asked in order, and only the first broken one is told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

Call = TypeVar("Call")


@dataclass(frozen=True)
class Rule(Generic[Call]):
    """One demand of an operator.

    Attributes:
        text: what must hold.
        source: where that is written.
        found: what a call has instead, or None where it keeps the rule. The rules before this one
            hold already.
    """

    text: str
    source: str
    found: Callable[[Call], str | None]


def broken(rules: Sequence[Rule[Call]], call: Call) -> str | None:
    """The first rule that a call breaks, as one line, or None."""
    for rule in rules:
        found = rule.found(call)
        if found is not None:
            return f"{rule.text}; {found} ({rule.source})"
    return None


def unless(holds: bool, found: str) -> str | None:
    """``found`` where something does not hold."""
    return None if holds else found


def name_of(dtype: torch.dtype) -> str:
    """A dtype without its module."""
    return str(dtype).removeprefix("torch.")
