"""Everything that only a GPU can tell, in one run of a few minutes.

Comes in: ``python -m qcompile.bench.device [--seconds 420] [--json FILE] [--tiny]``.
Goes out: lines of text as they come, and JSON: the device, what each kernel computed against the
reference, what copies and float products reach, times of linears and of experts beside cuBLAS, and
predicted against measured times.
Always holds: a section that fails is told and the others still run; the exit code is 1 when a
result was wrong; sections stop when the seconds are over, and say so. With ``--tiny`` sizes are
those that Triton's interpreter manages on a CPU; such times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from qcompile import backends
from qcompile.bench import device_sections as sections
from qcompile.bench.device_sections import Run
from qcompile.errors import QCompileError

Section = Callable[[Run], None]
# In the order of worth: what comes late may not be reached.
SECTIONS: dict[str, Section] = {
    "correct": sections.correct,
    "ceilings": sections.ceilings,
    "linear": sections.linears,
    "predicted": sections.predicted,
    "experts": sections.mixtures,
}


@dataclass
class Report:
    """What is known so far."""

    found: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def add(self, section: str, row: dict[str, Any]) -> None:
        """Keep and print one row."""
        self.found.setdefault(section, []).append(row)
        cells = (f"{k} {_shown(v)}" for k, v in row.items())
        print(f"{section:10} " + "  ".join(cells), flush=True)


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> int:
    """Run the sections; 1 where a result was wrong or a section failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=420.0)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", action="append", choices=tuple(SECTIONS))
    given = parser.parse_args()
    report, began = Report(), time.monotonic()
    run = Run(report.add, given.tiny, lambda: time.monotonic() - began > given.seconds)
    run.prepare(backends.load("cuda"))
    for name in given.only or SECTIONS:
        if run.late():
            report.failures.append(f"{name}: not reached in {given.seconds:.0f} seconds")
            continue
        try:
            SECTIONS[name](run)
        except Exception:  # the other sections still tell something
            report.failures.append(f"{name}: {traceback.format_exc()}")
    wrong = [row for row in report.found.get("correct", []) if not row["ok"]]
    for text in report.failures:
        print(text)
    print(f"{len(wrong)} results wrong, {time.monotonic() - began:.0f} seconds")
    if given.json:
        content = {"facts": run.facts(), **report.found, "failures": report.failures}
        Path(given.json).write_text(json.dumps(content, indent=1) + "\n")
    return 1 if wrong or report.failures else 0


if __name__ == "__main__":
    with torch.no_grad():
        try:
            raise SystemExit(main())
        except QCompileError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            raise SystemExit(2) from None
