"""The tables of the README, measured and put in their places by one command.

Comes in: ``python -m qcompile.bench.report --write README.md [--quick] [--only model,kernels]``.
Goes out: the file with the text between its markers replaced; whole tables in a file of their own
(``--details``), records as JSON (``--json``).
Always holds: only what stands between ``<!-- measured: NAME -->`` and ``<!-- end: NAME -->``
changes, for the sections that were measured; a marker that is missing is an error before anything
is measured; every section names its command, machine, versions and date.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qcompile.bench import report_sections
from qcompile.bench.report_sections import Settings
from qcompile.bench.tables import urgent
from qcompile.cli.bench_options import allowed_urgency, check_places
from qcompile.errors import OptionError, QCompileError, nearest

SECTIONS = report_sections.SECTIONS


@dataclass(frozen=True)
class Given:
    """The command line."""

    target: Path
    only: tuple[str, ...]
    settings: Settings
    details: Path | None
    record: Path | None


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write."""
    given = _given(arguments)
    page = given.target.read_text(encoding="utf-8")
    for name in given.only:
        require(page, name, given.target)
    whole: list[str] = []
    records: dict[str, Any] = {}
    for name in given.only:
        print(f"measuring {name}", file=sys.stderr, flush=True)
        found = SECTIONS[name](given.settings)
        # Written section by section: the next one may fail.
        page = replaced(given.target.read_text(encoding="utf-8"), name, found.summary)
        given.target.write_text(page, encoding="utf-8")
        whole += [f"## {found.title}", "", found.details, ""]
        records[name] = found.record
        _keep(given, whole, records)
    print(f"wrote {', '.join(given.only)} into {given.target}")
    return 0


def _keep(given: Given, whole: Sequence[str], records: dict[str, Any]) -> None:
    if given.details is not None:
        head = ["# Measured", "", f"Written by `{command(given)}`.", ""]
        given.details.write_text("\n".join([*head, *whole]), encoding="utf-8")
    if given.record is not None:
        given.record.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")


def command(given: Given) -> str:
    """What was run, without this machine's paths."""
    quick = " --quick" if given.settings.quick else ""
    only = "" if given.only == tuple(SECTIONS) else f" --only {','.join(given.only)}"
    written = f"python -m qcompile.bench.report --write {given.target.name}"
    return f"{written}{quick}{only}{urgent(given.settings)}"


# **** the file ****


def markers(name: str) -> tuple[str, str]:
    """The lines between which a section stands."""
    return f"<!-- measured: {name} -->", f"<!-- end: {name} -->"


def require(page: str, name: str, place: Path) -> None:
    """Raise OptionError unless a page has both markers of a section once, in their order."""
    first, last = markers(name)
    if page.count(first) == page.count(last) == 1 and page.index(first) < page.index(last):
        return
    raise OptionError(
        f"--write {place}",
        f"no place for {name}",
        f"the lines {first} and {last}, once each",
        "put them where the table belongs, or leave the section out with --only",
    )


def replaced(page: str, name: str, text: str) -> str:
    """The page with a section's text between its markers."""
    first, last = markers(name)
    pattern = re.compile(f"{re.escape(first)}.*?{re.escape(last)}", re.DOTALL)
    return pattern.sub(lambda match: f"{first}\n{text.strip()}\n{last}", page)


# **** the command line ****


def _given(arguments: Sequence[str] | None) -> Given:
    parser = argparse.ArgumentParser(prog="python -m qcompile.bench.report", description=__doc__)
    parser.add_argument("--write", required=True, metavar="FILE", help="the file with the markers")
    parser.add_argument("--only", default=",".join(SECTIONS), metavar="NAMES")
    parser.add_argument("--quick", action="store_true", help="small models, few formats and rounds")
    parser.add_argument("--urgent", action="store_true", help="measure with real-time priority")
    parser.add_argument(
        "--gemma", metavar="FILE", help="Gemma 3 270M Q4_K_M; else QCOMPILE_GEMMA, else the demo's"
    )
    parser.add_argument("--large", metavar="FILE", help="the 1.5B file; else it is written")
    parser.add_argument("--details", metavar="FILE", help="write whole tables as Markdown")
    parser.add_argument("--json", metavar="FILE", help="write everything measured as JSON")
    found = parser.parse_args(arguments)
    check_places(found, ("details", "json"))
    only = tuple(name.strip() for name in found.only.split(","))
    for name in only:
        if name not in SECTIONS:
            raise OptionError(
                f"--only {name}",
                "unknown",
                f"some of {', '.join(SECTIONS)}",
                f"correct the option{nearest(name, SECTIONS)}",
            )
    settings = Settings(
        quick=found.quick,
        urgent=allowed_urgency(found),
        gemma=found.gemma or os.environ.get("QCOMPILE_GEMMA"),
        large=found.large,
        folder=tempfile.gettempdir(),
    )
    details, record = (Path(p) if p else None for p in (found.details, found.json))
    return Given(Path(found.write), only, settings, details, record)


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except (QCompileError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        raise SystemExit(2) from None
