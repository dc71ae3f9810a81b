"""Rewrites of a program: one file each.

Comes in: a valid program. Goes out: a valid program with the same meaning.
Always holds: a pass has a ``name`` and a ``run(program) -> int`` that counts what changed; passes
never import backends; the order is the one of this table and nowhere else. Passes of other
packages, entry points of the group ``qcompile.passes``, follow the canonicalizing ones.
"""

from __future__ import annotations

import functools
from importlib.metadata import entry_points
from typing import Protocol

from qcompile.passes.canonicalize.embedding import CanonicalizeEmbedding
from qcompile.passes.canonicalize.last_rows import KeepLastRows
from qcompile.passes.canonicalize.linear import CanonicalizeLinear
from qcompile.passes.lower import Lower
from qcompile.passes.quantize.swap import SwapQuantized
from qcompile.program import Program


class Pass(Protocol):
    """A rewrite of a program in place."""

    @property
    def name(self) -> str:
        """What dumps, timings and switches call it, ``stage.rewrite``."""

    def run(self, program: Program) -> int:
        """Rewrite the program; the number of nodes that changed."""


CANONICALIZE: tuple[Pass, ...] = (CanonicalizeLinear(), CanonicalizeEmbedding(), KeepLastRows())
# Every pass in the order of the pipeline; those that need a session are made there.
NAMES = (
    *(rewrite.name for rewrite in CANONICALIZE),
    SwapQuantized.name,
    Lower.name,
    *("cpu.gated", "cpu.siblings", "cpu.attention"),  # of a backend: the CPU's
)


@functools.cache
def installed() -> tuple[Pass, ...]:
    """The passes that other packages bring, by the names of their entry points."""
    found = sorted(entry_points(group="qcompile.passes"), key=lambda entry: entry.name)
    return tuple(entry.load() for entry in found)
