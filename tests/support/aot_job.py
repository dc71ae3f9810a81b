"""Compiles a selection of the shipped kernels: one JSON line for each, on stdout.

Comes in: a number of the selection. Goes out: the rows of the table.
Always holds: it runs in a process of its own, because kernels are either compiled or interpreted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import torch

from qcompile.backends.cuda import aot
from qcompile.backends.cuda.shipped import (
    CROWDED,
    ROWS,
    SPECS,
    ExpertsCase,
    Launch,
    RowsCase,
    shipped,
)

NARROW, HALF = torch.bfloat16, torch.float16
# Whose every height of a tile is compiled: what codings differ in most.
_EVERY_HEIGHT = ("w4 g128 zero", "w4 g32 offset q4_k", "w2 g64 zero", "nf4 g64")
_ELSEWHERE = ("w4 g128 zero", "w4 g32 offset q4_k")
SELECTIONS = 3


def selected(number: int) -> Iterator[tuple[str, Launch]]:
    """Architectures and cases: about half a minute of one core each."""
    for case in shipped():
        if isinstance(case, ExpertsCase):
            if number == 2 and case.dtype == NARROW and case.choices in (8, 16384):
                yield "sm90", case
            elif number == 2 and case.dtype == NARROW and case.name in CROWDED:
                yield "sm80", case
            continue
        name, rows = case.name, getattr(case, "rows", None)
        plain = case.shape == (4096, 4096)
        if number < 2 and case.dtype == NARROW and (list(SPECS).index(name) % 2) == number:
            if rows in (1, 256) or (rows in ROWS and name in _EVERY_HEIGHT and plain):
                yield "sm90", case
            if isinstance(case, RowsCase) and name == "w6 g16 q6_k":
                yield "sm90", case
        if number == 2 and rows == 1 and case.dtype == HALF and name.startswith("w4") and plain:
            yield "sm90", case
        if number == 2 and rows in (1, 256) and case.dtype == NARROW and plain:
            yield from ((arch, case) for arch in _OTHERS if name in _ELSEWHERE)


_OTHERS = ("sm80", "sm89", "sm100")


if __name__ == "__main__":
    for where, one in selected(int(sys.argv[1])):
        print(json.dumps(aot.compiled(one, where).plain()), flush=True)
