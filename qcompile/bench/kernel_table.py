"""A report of ``qcompile.bench.kernel_run`` as text, Markdown and JSON.

Comes in: a report. Goes out: lines, or values that JSON has.
Always holds: milliseconds are medians over all calls, GB/s are packed bytes a call reads in that
time, ratios are medians over rounds of the ratio within a round.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from qcompile.bench.kernel_cases import Case
from qcompile.bench.kernel_peers import BASELINE
from qcompile.bench.kernel_run import Line, Options, Report, lines_of, ratio
from qcompile.bench.peers import Missing
from qcompile.bench.tables import Row, aligned, fitted, heading, piped, short, spread, urgent

_HEAD = (
    "kernel", "M", "ms", "(rounds)", "GB/s", "of read", "GFLOP/s", "x torch", "best peer", "x peer",
)  # fmt: skip
_LEFT_OUT = ("(rounds)", "GFLOP/s", "best peer")  # first where a terminal is narrow
NOTES = """GB/s counts the bytes of packed weights (for embeddings: of the rows looked up); *of
read* is its share of what memory gave in the same round; *x torch* is how many times as fast as
`F.linear` (`F.embedding`) on bfloat16 weights, *x peer* the same for the fastest peer that runs the
same format. The error is relative L2 against the values of the contender's own weight."""


def text(report: Report, width: int | None = None) -> str:
    """Tables for a terminal of so many columns, or of any number."""
    lines = [_limits(report)]
    notes: dict[str, str] = {}
    for case in dict.fromkeys(line.case for line in report.lines):
        ours = fitted([_HEAD, *(cells for _, cells in _rows(report, case))], _LEFT_OUT, width)
        peers = [("contender", *row[2:-1]) if n == 0 else (row[0], *row[2:-1])
                 for n, row in enumerate(_peers(report, case))]  # fmt: skip
        lines += ["", str(case), *(f"  {line}" for line in ours), ""]
        lines += [f"  {line}" for line in aligned(peers)]
        notes |= {row[0]: row[-1] for row in _peers(report, case)[1:] if row[0] not in notes}
    lines += ["", *(f"{name}: {note}" for name, note in notes.items())]
    return "\n".join([*lines, *_absent(report)])


def markdown(report: Report) -> str:
    """The same with the command, machine, versions and date."""
    options = report.options
    how = (
        f"{options.threads} threads each, {options.dtype} activations, weights gone round over "
        f"{options.rotated / 1e6:.0f} MB, medians of {options.rounds} rounds in turns"
    )
    given = (command(options), report.date, report.machine, report.versions)
    return "\n".join(
        [
            *heading(*given, how, (_limits(report), *_absent(report))),
            *piped(
                [
                    (_HEAD[0], "weight", *_HEAD[1:]),
                    *((cells[0], weight, *cells[1:]) for weight, cells in _rows(report)),
                ]
            ),
            "",
            "Milliseconds a call of everybody:",
            "",
            *piped(_peers(report)),
            "",
            NOTES,
        ]
    )


def summary(report: Report) -> str:
    """A line a kernel and weight: what one row streams, and how many rows compare."""
    options, counts = report.options, report.options.rows
    head = ("kernel", "weight", *(_column(n) for n in counts))
    rows: list[Row] = [head]
    found: dict[tuple[str, Case], dict[int, Line]] = {}
    for line in lines_of(report, own=True):
        found.setdefault((line.contender, line.case), {})[line.rows] = line
    for (kernel, case), lines in found.items():
        rows.append((kernel, str(case), *(_cell(report, lines.get(n)) for n in counts)))
    how = (
        f"{options.threads} threads each, {options.dtype} activations, weights gone round over "
        f"{options.rotated / 1e6:.0f} MB, medians of {options.rounds} rounds in turns"
    )
    given = (command(options), report.date, report.machine, report.versions)
    return "\n".join([*heading(*given, how, (_limits(report),)), *piped(rows), "", _SUMMARY])


_SUMMARY = """One row of activations is told by the bytes it streams, more rows by how many times as
fast they are as torch's bfloat16 `F.linear` and as the fastest peer of the same format."""


def _column(rows: int) -> str:
    return "M=1: GB/s (of read)" if rows == 1 else f"M={rows}: x torch, x peer"


def _cell(report: Report, line: Line | None) -> str:
    if line is None:
        return "-"
    if line.rows == 1:
        return f"{line.read / line.seconds / 1e9:.1f} ({report.of_bandwidth(line):.0%})"
    factor, best = report.against(line, BASELINE), report.best(line)
    beside = "-" if best is None else f"{ratio(line, best):.2f} ({best.contender})"
    return f"{'-' if factor is None else f'{factor:.2f}'}, {beside}"


def record(report: Report) -> dict[str, Any]:
    """Everything that was measured."""
    return {
        "command": command(report.options),
        "date": report.date,
        "machine": report.machine,
        "versions": report.versions,
        "peaks": report.peaks,
        "options": dataclasses.asdict(report.options),
        "reads": [
            {"case": dataclasses.asdict(case), "rows": rows, "rates": rates}
            for (case, rows), rates in report.reads.items()
        ],
        "lines": [dataclasses.asdict(line) for line in report.lines],
        "refused": report.refused,
        "missing": [dataclasses.asdict(missing) for missing in report.missing],
        "left": report.left,
    }


def restored(content: dict[str, Any]) -> Report:
    """The report of a record."""
    options = content["options"]
    options["cases"] = tuple(Case(**case) for case in options["cases"])
    tuples = {name: tuple(options[name]) for name in ("kernels", "rows", "against")}
    report = Report(Options(**{**options, **tuples}), content["machine"], content["date"])
    report.versions, report.peaks = content["versions"], content["peaks"]
    for row in content["reads"]:
        report.reads[Case(**row["case"]), row["rows"]] = row["rates"]
    report.lines = [Line(**{**line, "case": Case(**line["case"])}) for line in content["lines"]]
    report.refused = [tuple(row) for row in content["refused"]]
    report.missing = [Missing(**missing) for missing in content["missing"]]
    report.left = content["left"]
    return report


def command(options: Options) -> str:
    """The command line that measures the same."""
    linear = [case for case in options.cases if case.kind == "linear"]
    shapes = dict.fromkeys(f"{case.n}x{case.k}" for case in linear)
    formats = dict.fromkeys(case.format for case in linear)
    given = {
        "device": options.device,
        "kernel": ",".join(options.kernels),
        "formats": f'"{",".join(formats)}"',
        "shapes": ",".join(shapes),
        "rows": ",".join(map(str, options.rows)),
        "against": ",".join(options.against) or "none",
        "dtype": options.dtype,
        "rounds": options.rounds,
        "threads": options.threads,
    }
    words = (f"--{name} {value}" for name, value in given.items())
    return f"qcompile bench kernels {' '.join(words)}{urgent(options)}"


# **** rows ****


def _rows(report: Report, case: Case | None = None) -> list[tuple[str, Row]]:
    """The weight, and the cells under ``_HEAD``, of each of our lines."""
    return [
        (str(line.case), (line.contender, str(line.rows), *_figures(report, line)))
        for line in lines_of(report, own=True)
        if case in (None, line.case)
    ]


def _figures(report: Report, line: Line) -> Iterator[str]:
    _, whole = spread([1e3 * time for time in line.medians])
    yield spread([1e3 * line.seconds])[0]
    yield whole
    yield f"{line.read / line.seconds / 1e9:.1f}"
    yield f"{report.of_bandwidth(line):.0%}"
    yield short(line.work / line.seconds / 1e9) if line.work else "-"
    factor = report.against(line, BASELINE)
    yield "-" if factor is None else f"{factor:.2f}"
    best = report.best(line)
    yield "-" if best is None else best.contender
    yield "-" if best is None else f"{ratio(line, best):.2f}"


def _peers(report: Report, case: Case | None = None) -> list[Row]:
    """A line a contender and case, a column a number of rows."""
    counts = report.options.rows
    rows: list[Row] = [("contender", "weight", *(f"M={n} ms" for n in counts), "error", "note")]
    found: dict[tuple[Case, str], dict[int, Line]] = {}
    for line in report.lines:
        if case in (None, line.case):
            found.setdefault((line.case, line.contender), {})[line.rows] = line
    for (place, name), lines in found.items():
        first = next(iter(lines.values()))
        cells = (spread([lines[n].seconds * 1e3])[0] if n in lines else "-" for n in counts)
        rows.append((name, str(place), *cells, f"{first.error:.1g}", first.note))
    return rows


# **** facts ****


def _limits(report: Report) -> str:
    rates = [rate / 1e9 for found in report.reads.values() for rate in found]
    middle, whole = spread(rates) if rates else ("?", "?")
    peaks = ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in report.peaks.items())
    return f"memory read at {middle} GB/s ({whole}); torch's products of squares, GFLOP/s: {peaks}"


def _absent(report: Report) -> Iterable[str]:
    for missing in report.missing:
        yield f"{missing.name}, not measured: {missing.reason}"
    for what in report.left:
        yield f"no format describes {what}"
    reasons: dict[tuple[str, str], list[str]] = {}
    for name, what, why in report.refused:
        # That a peer has no kernel for a format is said by its absence.
        if not why.startswith("no kernel for"):
            reasons.setdefault((name, why), []).append(what)
    for (name, why), places in reasons.items():
        yield f"{name}, {', '.join(places)}: {why}"
