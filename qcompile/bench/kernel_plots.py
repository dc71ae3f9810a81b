"""Kernels as pictures: throughput against rows, and the roofline.

Comes in: a report of kernels. Goes out: SVG files.
Always holds: roofs are what this run measured (memory read, torch's products of large squares);
intensity is operations a byte of packed weights and of activations in and out.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from qcompile.bench.chart import COLOURS, Axis, Chart, logarithmic
from qcompile.bench.kernel_run import Line, Report
from qcompile.bench.model_plots import folder_of

_GREY = "#555"


def write(report: Report, folder: str | Path) -> list[Path]:
    """Write ``roofline.svg`` and ``rows-NxK-FORMAT.svg`` for every linear; their paths."""
    place = folder_of(folder)
    made: list[Path] = []
    linear = [line for line in report.lines if line.case.kind == "linear"]
    if not linear:
        return made
    made.append(_put(place / "roofline.svg", roofline(report, linear)))
    for case in dict.fromkeys(line.case for line in linear):
        name = f"rows-{case.n}x{case.k}-{case.format.replace(' ', '-')}.svg"
        lines = [line for line in linear if line.case == case]
        made.append(_put(place / name, against_rows(report, lines)))
    return made


def _put(path: Path, content: str) -> Path:
    path.write_text(content, encoding="utf-8")
    return path


def roofline(report: Report, lines: Sequence[Line]) -> str:
    """GFLOP/s against operations a byte; ours filled, peers hollow."""
    read = statistics.median(rate for rates in report.reads.values() for rate in rates)
    shown = [(line, intensity(line), line.work / line.seconds / 1e9) for line in lines]
    top = max(*report.peaks.values(), *(rate * 1e9 for _, _, rate in shown)) / 1e9
    x = logarithmic([value for _, value, _ in shown], "operations a byte", 4)
    low = min(rate for _, _, rate in shown)
    y = logarithmic([low, top], "GFLOP/s")
    chart = Chart(
        "Roofline of linears",
        x,
        y,
        f"{report.machine['processor']}, {report.options.threads} threads, {report.date}; filled: "
        "qcompile, hollow: peers",
    )
    _roofs(chart, read, report.peaks, top)
    names = list(dict.fromkeys(line.contender for line, _, _ in shown))
    for line, across, rate in shown:
        colour = COLOURS[names.index(line.contender) % len(COLOURS)]
        about = f"{line.contender}, {line.case}, M={line.rows}: {rate:.0f} GFLOP/s"
        chart.dot(across, max(rate, y.low), colour, about, hollow=not line.own)
    _legend(chart, names)
    return chart.svg()


def intensity(line: Line) -> float:
    """Operations a byte: weights as packed, activations and results of four bytes."""
    moved = line.read + 4 * line.rows * (line.case.n + line.case.k)
    return line.work / moved


def _roofs(chart: Chart, read: float, peaks: dict[str, float], top: float) -> None:
    """The slope of memory, then a ceiling for each dtype."""
    slope = read / 1e9
    ends = max(chart.x.low, chart.y.low / slope), min(chart.x.high, top / slope)
    chart.line([(at, at * slope) for at in ends], _GREY)
    inner = (ends[0] * ends[1] ** 3) ** 0.25
    chart.note(inner, inner * slope, f"memory, {slope:.0f} GB/s", _GREY)
    for name, rate in peaks.items():
        height = rate / 1e9
        start = max(chart.x.low, min(chart.x.high, height / slope))
        chart.line([(start, height), (chart.x.high, height)], _GREY, dashed=True)
        chart.name(chart.x.high, height, f"torch {name}, {height:.0f}", _GREY)


def _legend(chart: Chart, names: Sequence[str]) -> None:
    """Names of colours, down the right side from the bottom."""
    step = (chart.y.high / chart.y.low) ** (1 / 22)
    for at, name in enumerate(reversed(names)):
        colour = COLOURS[(len(names) - 1 - at) % len(COLOURS)]
        chart.name(chart.x.high, chart.y.low * step ** (at + 0.5), f"● {name}", colour)


def against_rows(report: Report, lines: Sequence[Line]) -> str:
    """Rows a second against rows of a call, of everybody who runs one weight."""
    case = lines[0].case
    rate: Callable[[Line], float] = lambda line: line.rows / line.seconds  # noqa: E731
    rows = sorted({line.rows for line in lines})
    x = Axis(
        float(rows[0]), float(max(rows[-1], rows[0] + 1)), "rows of activations (M)",
        tuple(map(float, rows)), log=True,
    )  # fmt: skip
    y = logarithmic([rate(line) for line in lines], "rows/s")
    chart = Chart(
        f"{case.format}, {case.n} x {case.k}",
        x,
        y,
        f"{report.machine['processor']}, {report.options.threads} threads, {report.date}",
    )
    names = list(dict.fromkeys(line.contender for line in lines))
    for at, name in enumerate(names):
        mine = [line for line in lines if line.contender == name]
        points = [(float(line.rows), rate(line)) for line in mine]
        colour = COLOURS[at % len(COLOURS)]
        chart.line(points, colour, dashed=not mine[0].own)
        for line in mine:
            slow, quick = line.rows / max(line.medians), line.rows / min(line.medians)
            chart.bar(line.rows, max(slow, y.low), min(quick, y.high), colour)
            about = f"{name}, {line.rows}: {line.seconds * 1e3:.3g} ms"
            chart.dot(line.rows, rate(line), colour, about, hollow=not line.own)
        chart.name(*points[-1], name, colour)
    return chart.svg()
