"""What kernels for a GPU need of it, compiled where there is none.

Comes in: architectures. Goes out: a table, one line a kernel and tile, and the rules they break.
Always holds: nothing is timed: the figures are those of the binaries.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from qcompile.errors import OptionError, nearest

_HEAD = ("kernel", "arch", "tile", "warps", "stages", "regs", "stack", "shared", "i/w", "products")
_WIDTHS = (44, 5, 13, 5, 6, 5, 5, 7, 6, 14)
_PRODUCTS = ("HGMMA", "UTCMMA", "HMMA")


def report(architectures: Sequence[str], only: str, file: str | None) -> int:
    """Print the table; 1 where a kernel breaks a rule.

    Args:
        architectures: for instance ``("sm80", "sm90")``; empty for all that are shipped for.
        only: text that a case's name has to have.
        file: where to write the figures as JSON, or None.
    """
    rows: list[dict[str, Any]] = []
    broken = 0
    for row in _rows(architectures, only):
        if not rows:
            print(_line(_HEAD))
        rows.append(row)
        print(_line(_cells(row)), flush=True)
        for text in row["broken"]:
            broken += 1
            print(f"    {text}", flush=True)
    print(f"{len(rows)} kernels, {broken} rules broken; compiled, not run")
    if file is not None:
        Path(file).write_text(json.dumps(rows, indent=1) + "\n")
    return 1 if broken else 0


def _rows(architectures: Sequence[str], only: str) -> Iterator[dict[str, Any]]:
    from qcompile.backends.cuda.ahead import require_compiler

    require_compiler()
    from qcompile.backends.cuda import aot
    from qcompile.backends.cuda.configs import SHARED
    from qcompile.backends.cuda.shipped import shipped

    for arch in architectures:
        if arch not in SHARED:
            raise OptionError(
                f"--arch {arch}",
                "unknown",
                f"one of {', '.join(SHARED)}",
                f"name a known architecture{nearest(arch, SHARED)}",
            )
    cases = [case for case in shipped() if only in str(case)]
    for row in aot.table(cases, architectures or aot.ARCHITECTURES):
        yield row.plain()


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    products = [f"{n} {name}" for name in _PRODUCTS if (n := row["counts"].get(name))]
    return (
        row["case"],
        row["arch"],
        row["tile"],
        *(str(row[name]) for name in ("warps", "stages", "registers")),
        str(row["stack"] + row["local"]),
        str(row["shared"]),
        f"{row['per_weight']:.2f}",
        " ".join(products),
    )


def _line(cells: Sequence[str]) -> str:
    return "  ".join(c.ljust(w) for c, w in zip(cells, _WIDTHS, strict=True)).rstrip()
