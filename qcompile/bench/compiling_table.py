"""A report of ``qcompile.bench.compiling`` as text, Markdown and JSON.

Comes in: a report. Goes out: lines, or values that JSON has.
Always holds: a row a stage, a column a model; passes stand under their sum.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from qcompile.bench.compiling import Options, Report
from qcompile.bench.tables import Row, aligned, heading, piped, urgent

_STAGES = (
    "open", "open, build, plan", "pack", "trace", "capture", "passes", "transform weights",
    "bind the rest", "inductor", "all",
)  # fmt: skip
_NOTES = """Trace is what dynamo takes besides our own stages, inductor everything after the lowered
graph. The exponent is that of the growth between the two largest models: 1 is linear."""


def text(report: Report) -> str:
    """The table for a terminal."""
    return "\n".join([*aligned(_rows(report)), "", _verdict(report)])


def markdown(report: Report) -> str:
    """The same with the command, machine, versions and date."""
    options = report.options
    how = (
        f"{options.threads} threads, {options.dtype} activations, numerics {options.numerics}, "
        f"medians of {options.rounds} rounds with Inductor's cache empty; seconds"
    )
    given = (command(options), report.date, report.machine, report.versions)
    return "\n".join([*heading(*given, how), *piped(_rows(report)), "", _NOTES, _verdict(report)])


def record(report: Report) -> dict[str, Any]:
    """Everything that was measured."""
    return {"command": command(report.options), **dataclasses.asdict(report)}


def command(options: Options) -> str:
    """The command line that measures the same."""
    layers = ",".join(map(str, options.layers))
    what = options.file or f"--layers {layers}"
    given = f"--dtype {options.dtype} --numerics {options.numerics} --rounds {options.rounds}"
    return f"qcompile bench compile {what} {given} --threads {options.threads}{urgent(options)}"


def _rows(report: Report) -> list[Row]:
    names = [run.name for run in report.runs]
    several = len(report.runs) > 1
    rows: list[Row] = [("stage", *names, *(("ms a layer", "exponent") if several else ()))]
    found = report.runs[-1].stages
    stages = [name for name in _STAGES if name in found]
    at = stages.index("passes") + 1
    stages[at:at] = [name for name in found if name.startswith("pass ")]
    for stage in stages:
        cells = [_seconds(run.seconds(stage)) for run in report.runs]
        more = (_layer(report, stage), _exponent(report, stage)) if several else ()
        shown = f"  {stage.removeprefix('pass ')}" if stage.startswith("pass ") else stage
        rows.append((shown, *cells, *more))
    for name in report.runs[-1].counts:
        cells = [str(run.counts[name]) for run in report.runs]
        rows.append((name, *cells, *(("", "") if several else ())))
    return rows


def _seconds(value: float) -> str:
    return f"{value:.4f}" if value < 0.1 else f"{value:.2f}"


def _layer(report: Report, stage: str) -> str:
    found = report.a_layer(stage)
    return "-" if found is None else f"{found * 1e3:.1f}"


def _exponent(report: Report, stage: str) -> str:
    found = report.exponent(stage)
    return "-" if found is None else f"{found:.2f}"


def _verdict(report: Report) -> str:
    found = report.exponent("all")
    if found is None:
        return f"in all {report.runs[-1].seconds('all'):.1f} s"
    less, more = report.runs[-2:]
    kind = "no more than linear" if found <= 1.1 else "more than linear"
    return f"from {less.name} to {more.name} compiling grew with exponent {found:.2f}: {kind}"
