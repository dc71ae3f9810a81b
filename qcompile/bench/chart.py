"""Charts as SVG, without a plotting library.

Comes in: axes, points, lines and names. Goes out: the text of a picture.
Always holds: what has a name is named beside it, and names do not overlap; colours tell apart on
white; text that comes from outside is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 760, 440
LEFT, RIGHT, TOP, BOTTOM = 70, 190, 56, 56
COLOURS = (
    "#0b6e4f", "#c8553d", "#3d5a98", "#8a6d00", "#7b3f8c", "#2b8a9e",
    "#6b6b6b", "#c2447f", "#5a8f1e", "#a86a32", "#1f3f6e", "#9a8fd0",
)  # fmt: skip
_APART = 16  # pixels between names
_LETTER = 7.2  # pixels of a letter of 13


@dataclass(frozen=True)
class Axis:
    """From a value to pixels; ``log`` axes have ticks at powers of two or ten."""

    low: float
    high: float
    label: str
    ticks: tuple[float, ...]
    log: bool = False

    def share(self, value: float) -> float:
        """0 at the low end, 1 at the high end."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


@dataclass
class Chart:
    """A picture that grows."""

    title: str
    x: Axis
    y: Axis
    subtitle: str = ""
    parts: list[str] = field(default_factory=list)
    names: list[tuple[float, float, str, str]] = field(default_factory=list)

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Pixels of a point."""
        across = LEFT + (WIDTH - LEFT - RIGHT) * self.x.share(x)
        return across, HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * self.y.share(y)

    def line(
        self, points: Sequence[tuple[float, float]], colour: str, dashed: bool = False
    ) -> None:
        """A line through points."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (self.at(*point) for point in points))
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>'
        )

    def dot(self, x: float, y: float, colour: str, about: str = "", hollow: bool = False) -> None:
        """A point; ``about`` is shown where a pointer rests on it."""
        across, up = self.at(x, y)
        title = f"<title>{escape(about)}</title>" if about else ""
        inner = "white" if hollow else colour
        self.parts.append(
            f'<circle cx="{across:.1f}" cy="{up:.1f}" r="4" fill="{inner}" stroke="{colour}" '
            f'stroke-width="1.5">{title}</circle>'
        )

    def bar(self, x: float, low: float, high: float, colour: str) -> None:
        """From the slowest to the fastest."""
        across, bottom = self.at(x, low)
        top = self.at(x, high)[1]
        self.parts.append(
            f'<line x1="{across:.1f}" x2="{across:.1f}" y1="{bottom:.1f}" y2="{top:.1f}" '
            f'stroke="{colour}"/>'
        )

    def name(self, x: float, y: float, text: str, colour: str) -> None:
        """A name to the right of a point."""
        across, up = self.at(x, y)
        self.names.append((across + 9, up, text, colour))

    def note(self, x: float, y: float, text: str, colour: str = "#555") -> None:
        """A name that ends to the left of a point and over it: beside a line that rises."""
        across, up = self.at(x, y)
        self.parts.append(
            f'<text x="{across - 8:.1f}" y="{up - 6:.1f}" fill="{colour}" font-size="12" '
            f'text-anchor="end">{escape(text)}</text>'
        )

    def svg(self) -> str:
        """The text of the picture."""
        head = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            f'width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="13">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
            f'<text x="{LEFT}" y="22" font-size="15">{escape(self.title)}</text>',
            f'<text x="{LEFT}" y="40" font-size="12" fill="#555">{escape(self.subtitle)}</text>',
        ]
        return "\n".join([*head, *self._axes(), *self.parts, *self._named(), "</svg>", ""])

    def _axes(self) -> Iterator[str]:
        right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
        for value in self.y.ticks:
            y = self.at(self.x.low, value)[1]
            yield f'<line x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
            yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>'
        for value in self.x.ticks:
            x = self.at(value, self.y.low)[0]
            yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}" stroke="#eee"/>'
            yield f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{value:g}</text>'
        middle = (LEFT + right) / 2
        yield f'<text x="{middle}" y="{HEIGHT - 14}" text-anchor="middle">{self.x.label}</text>'
        across, centre = 18, (TOP + bottom) / 2
        yield (
            f'<text x="{across}" y="{centre}" text-anchor="middle" '
            f'transform="rotate(-90 {across} {centre})">{self.y.label}</text>'
        )

    def _named(self) -> Iterator[str]:
        heights = apart([y for _, y, _, _ in self.names])
        for (x, _, text, colour), y in zip(self.names, heights, strict=True):
            room = max(4, int((WIDTH - x) / _LETTER))
            shown = text if len(text) <= room else text[: room - 1] + "…"
            place = f'x="{x:.1f}" y="{y + 4:.1f}"'
            yield f'<text {place} fill="{colour}">{escape(shown)}</text>'


def apart(heights: Sequence[float]) -> list[float]:
    """The same heights, moved where two names would overlap; none leaves the picture."""
    placed = [0.0] * len(heights)
    order = sorted(range(len(heights)), key=heights.__getitem__)
    before = -math.inf
    for at in order:
        before = placed[at] = max(heights[at], before + _APART)
    after = HEIGHT - 10 + float(_APART)
    for at in reversed(order):
        after = placed[at] = min(placed[at], after - _APART)
    return placed


def linear(high: float, label: str) -> Axis:
    """From zero, with four equal steps to a round number."""
    top = round_up(high)
    return Axis(0.0, top, label, tuple(top * step / 4 for step in range(5)))


def logarithmic(values: Sequence[float], label: str, base: int = 10) -> Axis:
    """Over all values, from a power of ``base`` to another."""
    low = base ** math.floor(math.log(min(values), base) + 1e-9)
    high = base ** math.ceil(math.log(max(values), base) - 1e-9)
    if high <= low:
        high = low * base
    count = round(math.log(high / low, base))
    every = max(1, -(-count // 8))
    ticks = tuple(float(low * base**step) for step in range(0, count + 1, every))
    return Axis(float(low), float(high), label, ticks, log=True)


def round_up(value: float) -> float:
    """The next of 1, 2, 4, 8 times a power of ten, so that quarters are short numbers."""
    power = float(10 ** math.floor(math.log10(value)))
    return next(step * power for step in (1, 2, 4, 8, 10) if step * power >= value)
