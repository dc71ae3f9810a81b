"""Throughput against batch as SVG, without a plotting library.

Comes in: a report. Goes out: one file for prefill and one for decode.
Always holds: both axes begin at zero; a point is a median, its bar reaches from the slowest to the
fastest round; each line is named where it ends.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from qcompile.bench.model import Figures, Report
from qcompile.errors import OptionError

_WIDTH, _HEIGHT = 720, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 130, 50, 55
_COLOURS = ("#0b6e4f", "#c8553d", "#3d5a98", "#8a6d00")
_APART = 16  # pixels between names of lines


def write(report: Report, folder: str | Path) -> list[Path]:
    """Write ``prefill.svg`` and ``decode.svg`` into a folder; their paths."""
    place = Path(folder)
    if not place.is_dir():
        raise OptionError(
            f"--plots {folder}", "no such folder", "a folder that exists", "make it first"
        )
    made = []
    for kind in ("prefill", "decode"):
        path = place / f"{kind}.svg"
        path.write_text(svg(report, kind), encoding="utf-8")
        made.append(path)
    return made


def svg(report: Report, kind: str) -> str:
    """One picture; ``kind`` is ``prefill`` or ``decode``."""
    lines = [(figures, _rates(figures, kind)) for figures in report.contenders]
    top = _round_up(max(max(values) for _, rates in lines for values in rates.values()))
    last = max(report.options.batches)
    title = f"{kind}, tokens/s, {Path(report.options.file).name}, {report.machine['processor']}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
        ' font-family="sans-serif" font-size="13">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="24" font-size="14">{escape(title)}</text>',
        *_axes(report.options.batches, top, last),
    ]
    ends = _apart([_y(statistics.median(list(rates.values())[-1]), top) for _, rates in lines])
    for at, (figures, rates) in enumerate(lines):
        colour = _COLOURS[at % len(_COLOURS)]
        parts += _line(rates, top, last, colour)
        place = f'x="{_x(max(rates), last) + 10:.1f}" y="{ends[at] + 4:.1f}"'
        parts.append(f'<text {place} fill="{colour}">{escape(figures.name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _rates(figures: Figures, kind: str) -> dict[int, list[float]]:
    return dict(sorted((figures.prefill if kind == "prefill" else figures.decode).items()))


def _axes(batches: Sequence[int], top: float, last: int) -> Iterator[str]:
    for step in range(5):
        value = top * step / 4
        y = _y(value, top)
        yield (
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
        )
        yield f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>'
    for batch in sorted(batches):
        x, y = _x(batch, last), _HEIGHT - _BOTTOM + 20
        yield f'<text x="{x:.1f}" y="{y}" text-anchor="middle">{batch}</text>'
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    yield f'<text x="{middle}" y="{_HEIGHT - 12}" text-anchor="middle">sequences at once</text>'


def _line(rates: dict[int, list[float]], top: float, last: int, colour: str) -> Iterator[str]:
    points = [
        (_x(batch, last), _y(statistics.median(values), top)) for batch, values in rates.items()
    ]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
    for (x, y), values in zip(points, rates.values(), strict=True):
        low, high = _y(min(values), top), _y(max(values), top)
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}" stroke="{colour}"/>'
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>'


def _x(batch: int, last: int) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * batch / last


def _y(value: float, top: float) -> float:
    return _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * value / top


def _round_up(value: float) -> float:
    """The next of 1, 2, 4, 8 times a power of ten, so that quarters are short numbers."""
    power = float(10 ** math.floor(math.log10(value)))
    return next(step * power for step in (1, 2, 4, 8, 10) if step * power >= value)


def _apart(heights: Sequence[float]) -> list[float]:
    """The same heights, moved down where two names would overlap."""
    placed: list[float] = [0.0] * len(heights)
    before = -math.inf
    for at in sorted(range(len(heights)), key=heights.__getitem__):
        before = placed[at] = max(heights[at], before + _APART)
    return placed
