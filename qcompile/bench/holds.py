"""What the CPU kernels have to reach, and whether a report says that they do.

Comes in: figures of kernels and of transforms. Goes out: rows: the work, the yardstick, what is
wanted, what was found, and whether it holds.
Always holds: a yardstick that was not measured makes a row say so instead of holding; a row's
figure is the least favourable of the weights and shapes it stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from qcompile.bench.kernel_peers import BASELINE
from qcompile.bench.kernel_run import Line, Report, lines_of, ratio
from qcompile.bench.tables import Row, aligned, piped

_FOUR_BITS = ("4-bit g32", "4-bit g128", "q4_0", "q4_k", "nf4 g64", "iq4_nl", "mxfp4")
STREAMED = ("4-bit g32", "4-bit g128", "q4_k", "q5_0", "q6_k")
BANDWIDTH, PEER, TORCH = 0.75, 1.3, 1.0
HEAD: Row = ("work", "against", "wanted", "found", "holds")


@dataclass(frozen=True)
class Claim:
    """One row. ``found`` is None where nothing was measured that decides it."""

    work: str
    against: str
    wanted: float
    found: float | None
    where: str = ""

    @property
    def row(self) -> Row:
        """Cells of a table."""
        if self.found is None:
            return (self.work, self.against, f"{self.wanted:.2f}", "not measured", "-")
        verdict = "yes" if self.found >= self.wanted else "no"
        found = f"{self.found:.2f}" + (f" ({self.where})" if self.where else "")
        return (self.work, self.against, f"{self.wanted:.2f}", found, verdict)


def of_kernels(report: Report) -> list[Claim]:
    """What linears have to reach, by kernel, format and rows."""
    claims = []
    own = [line for line in lines_of(report, own=True) if line.case.kind == "linear"]
    for kernel in dict.fromkeys(line.contender for line in own):
        mine = [line for line in own if line.contender == kernel]
        for format in dict.fromkeys(line.case.format for line in mine):
            if format in STREAMED:
                claims += _of_format(report, kernel, [m for m in mine if m.case.format == format])
    return claims


def _of_format(report: Report, kernel: str, lines: Sequence[Line]) -> list[Claim]:
    name = f"{kernel}, {lines[0].case.format}"
    made = []
    for rows in sorted({line.rows for line in lines}):
        some, work = [line for line in lines if line.rows == rows], f"{name}, M={rows}"
        if rows == 1:
            made.append(_least(work, "read bandwidth", BANDWIDTH, some, report.of_bandwidth))
        elif rows in (8, 64) and lines[0].case.format in _FOUR_BITS:
            made.append(_against_best(report, work, some))
        elif rows == 512:
            against = "torch bf16 F.linear"
            made.append(
                _least(work, against, TORCH, some, lambda line: report.against(line, BASELINE))
            )
    return made


def _against_best(report: Report, work: str, lines: Sequence[Line]) -> Claim:
    """Against the fastest peer with any 4-bit format of the same shape."""
    peer_of: dict[int, str] = {}

    def factor(line: Line) -> float | None:
        peers = [p for p in _of_shape(report, line) if not p.own and p.contender != BASELINE]
        best = min(peers, key=lambda peer: peer.seconds, default=None)
        if best is None:
            return None
        same = best.case == line.case
        peer_of[id(line)] = best.contender if same else f"{best.contender}, {best.case.format}"
        # Rounds of another format are other rounds: their medians are compared.
        return ratio(line, best) if same else best.seconds / line.seconds

    claim = _least(work, "best 4-bit peer", PEER, lines, factor)
    worst = [line for line in lines if claim.where == _shape(line)]
    return replace(claim, where=f"{claim.where}, {peer_of[id(worst[0])]}") if worst else claim


def _of_shape(report: Report, line: Line) -> Iterable[Line]:
    for other in report.lines:
        same = (other.case.n, other.case.k, other.rows) == (line.case.n, line.case.k, line.rows)
        if same and other.case.format in _FOUR_BITS:
            yield other


def _least(
    work: str,
    against: str,
    wanted: float,
    lines: Sequence[Line],
    figure: Callable[[Line], float | None],
) -> Claim:
    found = [(value, line) for line in lines if (value := figure(line)) is not None]
    if not found:
        return Claim(work, against, wanted, None)
    value, line = min(found, key=lambda pair: pair[0])
    return Claim(work, against, wanted, value, _shape(line))


def _shape(line: Line) -> str:
    return f"{line.case.n} x {line.case.k}"


def table(claims: Iterable[Claim]) -> list[Row]:
    """Rows with a head."""
    return [HEAD, *(claim.row for claim in claims)]


def text(claims: Iterable[Claim]) -> str:
    """The rows for a terminal."""
    return "\n".join(aligned(table(claims)))


def markdown(claims: Iterable[Claim]) -> str:
    """The rows as Markdown."""
    return "\n".join(piped(table(claims)))
