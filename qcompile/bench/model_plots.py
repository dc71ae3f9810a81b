"""Throughput of a model against sequences at once, and against the length of prompts.

Comes in: a report of a model. Goes out: SVG files.
Always holds: the figures' axis begins at zero; a point is a median, its bar reaches from the
slowest to the fastest round; each line is named where it ends.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

from qcompile.bench.chart import COLOURS, Axis, Chart, linear
from qcompile.bench.model import Figures, Report, Size
from qcompile.errors import OptionError

_KINDS = ("prefill", "decode")
_Rates = dict[float, list[float]]


def write(report: Report, folder: str | Path) -> list[Path]:
    """Write ``prefill.svg`` and ``decode.svg`` into a folder; their paths.

    Where several lengths of prompts were run, also the same against length: ``*-length.svg``.
    """
    place, made = folder_of(folder), []
    for kind in _KINDS:
        made.append(place / f"{kind}.svg")
        made[-1].write_text(against_batch(report, kind), encoding="utf-8")
        if len(report.options.prompts) > 1:
            made.append(place / f"{kind}-length.svg")
            made[-1].write_text(against_length(report, kind), encoding="utf-8")
    return made


def folder_of(folder: str | Path) -> Path:
    """A folder that plots are written to. Raises OptionError where there is none."""
    place = Path(folder)
    if not place.is_dir():
        raise OptionError(
            f"--plots {folder}", "no such folder", "a folder that exists", "make it first"
        )
    return place


def against_batch(report: Report, kind: str) -> str:
    """One picture; ``kind`` is ``prefill`` or ``decode``. The longest prompt stands for all."""
    prompt = max(report.options.prompts)
    lines = _lines(report, kind, lambda size: size.batch if size.prompt == prompt else None)
    where = tuple(float(batch) for batch in sorted(report.options.batches))
    about = f"prompts of {prompt} tokens"
    return _chart(report, kind, about, lines, Axis(0.0, where[-1], "sequences at once", where))


def against_length(report: Report, kind: str) -> str:
    """The same over lengths of prompts, with as few sequences at once as were run."""
    batch = min(report.options.batches)
    lines = _lines(report, kind, lambda size: size.prompt if size.batch == batch else None)
    where = tuple(float(prompt) for prompt in sorted(report.options.prompts))
    about = f"{batch} at once"
    return _chart(report, kind, about, lines, Axis(0.0, where[-1], "tokens of a prompt", where))


def _lines(report: Report, kind: str, place: Callable[[Size], int | None]) -> dict[str, _Rates]:
    """Each contender's rates where ``place`` says that a size belongs, in the order of sizes."""
    found: dict[str, _Rates] = {}
    for figures in report.contenders:
        line = found[figures.name] = {}
        for size, rates in sorted(_rates(figures, kind).items()):
            at = place(size)
            if at is not None:
                line[float(at)] = rates
    return found


def _chart(report: Report, kind: str, about: str, lines: dict[str, _Rates], x: Axis) -> str:
    shown = {name: rates for name, rates in lines.items() if rates}
    highest = max(max(values) for rates in shown.values() for values in rates.values())
    options = report.options
    chart = Chart(
        f"{kind}, {Path(options.file).name}",
        x,
        linear(highest, "tokens/s"),
        f"{report.machine['processor']}, {options.threads} threads, {about}, {report.date}",
    )
    for (name, rates), colour in zip(shown.items(), _colours(), strict=False):
        points = [(at, statistics.median(values)) for at, values in rates.items()]
        chart.line(points, colour)
        for (at, middle), values in zip(points, rates.values(), strict=True):
            chart.bar(at, min(values), max(values), colour)
            chart.dot(at, middle, colour, f"{name}, {at:g}: {middle:.1f} tokens/s")
        chart.name(*points[-1], name, colour)
    return chart.svg()


def _colours() -> Iterator[str]:
    while True:
        yield from COLOURS


def _rates(figures: Figures, kind: str) -> dict[Size, list[float]]:
    return dict(figures.prefill if kind == "prefill" else figures.decode)
