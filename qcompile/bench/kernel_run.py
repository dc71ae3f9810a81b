"""Kernels beside their peers, timed in turns.

Comes in: options. Goes out: a report: seconds of every call, by contender, case and rows.
Always holds: every contender has a process of its own and the same threads; a round times each of
them once, and reads memory once, so that a busy machine slows all of it; ratios are between figures
of one round.
"""

from __future__ import annotations

import contextlib
import datetime
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from qcompile.bench.kernel_cases import Case
from qcompile.bench.kernel_peers import BASELINE, baseline, limits, own, peers
from qcompile.bench.machine import machine
from qcompile.bench.model_process import BenchError, Process, started
from qcompile.bench.peers import Missing

Step = Callable[[str], object]


@dataclass(frozen=True)
class Options:
    """What is measured.

    Attributes:
        device: a target of kind ``cpu``.
        kernels: names of ours.
        cases: weights.
        rows: numbers of rows of activations.
        against: names of peers.
        dtype: of our activations.
        rounds: of turns.
        seconds: that a contender's turn takes, where one call is shorter.
        rotated: bytes of weights that are gone round.
        limit: seconds that a call may take; slower peers are not measured.
        threads: of each contender.
        urgent: measure with real-time priority (Linux, needs the right to).
    """

    device: str
    kernels: tuple[str, ...]
    cases: tuple[Case, ...]
    rows: tuple[int, ...]
    against: tuple[str, ...]
    dtype: str
    rounds: int
    seconds: float
    rotated: int
    limit: float
    threads: int
    urgent: bool


@dataclass
class Line:
    """One contender on one case with so many rows; ``rounds`` holds seconds of calls."""

    contender: str
    own: bool
    case: Case
    rows: int
    nbytes: int
    error: float
    note: str
    rounds: list[list[float]] = field(default_factory=list)

    @property
    def medians(self) -> list[float]:
        """Median seconds of a call, round by round."""
        return [statistics.median(times) for times in self.rounds]

    @property
    def seconds(self) -> float:
        """Median seconds of a call, over all rounds."""
        return statistics.median(time for times in self.rounds for time in times)

    @property
    def read(self) -> int:
        """Bytes of weights that a call reads."""
        if self.case.kind == "embedding":
            return self.nbytes // self.case.n * self.rows
        return self.nbytes

    @property
    def work(self) -> int:
        """Floating-point operations of a call."""
        return 0 if self.case.kind == "embedding" else 2 * self.case.n * self.case.k * self.rows


@dataclass
class Report:
    """What was found.

    Attributes:
        options, machine, date, versions: of the run.
        peaks: operations a second of large products, by dtype.
        lines: the figures.
        reads: bytes a second read from memory, one for each round, by case and rows.
        refused: contender, what it was asked, and why it does not do it.
        missing: peers that could not be started.
        left: what a checkpoint has and no format describes.
    """

    options: Options
    machine: dict[str, object]
    date: str
    versions: dict[str, str] = field(default_factory=dict)
    peaks: dict[str, float] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    reads: dict[tuple[Case, int], list[float]] = field(default_factory=dict)
    refused: list[tuple[str, str, str]] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def others(self, line: Line, own: bool = False) -> Iterator[Line]:
        """Lines of the same case and rows by peers, or by kernels of ours."""
        for other in self.lines:
            same = (other.case, other.rows) == (line.case, line.rows)
            if same and other is not line and other.own == own:
                yield other

    def of_bandwidth(self, line: Line) -> float:
        """Bytes a second as a share of what memory gave in the same round: the median."""
        reads = self.reads[line.case, line.rows]
        return statistics.median(
            line.read / time / rate for time, rate in zip(line.medians, reads, strict=True)
        )

    def against(self, line: Line, peer: str) -> float | None:
        """How many times as fast as a peer: the median over rounds."""
        found = next((o for o in self.others(line) if o.contender == peer), None)
        return None if found is None else ratio(line, found)

    def best(self, line: Line, like: Callable[[Line], bool] = lambda line: True) -> Line | None:
        """The fastest peer of the same case and rows, the baseline left out."""
        found = [o for o in self.others(line) if o.contender != BASELINE and like(o)]
        return min(found, key=lambda o: o.seconds, default=None)


def ratio(line: Line, other: Line) -> float:
    """How many times as fast as another line: the median over rounds."""
    return statistics.median(b / a for a, b in zip(line.medians, other.medians, strict=True))


def steps(options: Options) -> int:
    """How often ``measure`` reports."""
    contenders = 1 + len(options.kernels) + len(options.against)
    return len(options.cases) * (contenders + len(options.rows) * options.rounds)


def measure(options: Options, step: Step = lambda what: None) -> Report:
    """Run the contenders.

    Args:
        options: what to measure.
        step: called before each part with its name.

    Raises:
        BenchError: a kernel of ours failed; a peer's failure is in the report.
    """
    today = datetime.date.today().isoformat()
    report = Report(options, machine(), today)
    chosen = peers(options.against)
    report.missing = [found for found in chosen if isinstance(found, Missing)]
    able = [found for found in chosen if not isinstance(found, Missing)]
    ours = [own(kernel, options.device, options.dtype) for kernel in options.kernels]
    with contextlib.ExitStack() as stack:
        limit = stack.enter_context(started(limits(), options.threads))
        runs = [
            stack.enter_context(started(contender, options.threads))
            for contender in (*ours, baseline(), *able)
        ]
        report.peaks = limit.ask("peaks", urgent=options.urgent, seconds=0.3)["rates"]
        for process in _answering(runs, report, len(ours)):
            report.versions |= process.ask("facts")["versions"]
        for case in options.cases:
            _case(case, limit, runs, report, step)
    return report


def _answering(runs: list[Process], report: Report, ours: int) -> list[Process]:
    """Processes that live; a peer that died at its start is missing, a kernel of ours raises."""
    for number, process in enumerate(list(runs)):
        try:
            process.ask("facts")
        except BenchError as error:
            if number < ours:
                raise
            report.missing.append(Missing(process.contender.name, str(error)))
            runs.remove(process)
    return runs


def _case(case: Case, limit: Process, runs: list[Process], report: Report, step: Step) -> None:
    options, facts = report.options, {}
    for process in runs:
        name = process.contender.name
        step(f"{case}: {name}")
        given = {"kind": case.kind, "format": case.format, "n": case.n, "k": case.k}
        more = {"rotated": options.rotated, "urgent": options.urgent}
        answer = _ask(process, report, str(case), "prepare", **given, **more)
        if answer is not None:
            facts[name] = answer
    for rows in options.rows:
        lines = {}
        for process in runs:
            name = process.contender.name
            if name in facts:
                made = facts[name]
                size, error, note = made["bytes"], made["relative_l2"], made["note"]
                lines[name] = Line(name, name in options.kernels, case, rows, size, error, note)
        _rounds(
            case, rows, limit, [p for p in runs if p.contender.name in lines], lines, report, step
        )
        report.lines += [line for line in lines.values() if line.rounds]
    for process in runs:
        _ask(process, report, str(case), "drop")
    runs[:] = [process for process in runs if process.process.poll() is None]


def _rounds(
    case: Case,
    rows: int,
    limit: Process,
    runs: list[Process],
    lines: dict[str, Line],
    report: Report,
    step: Step,
) -> None:
    options, reads = report.options, []
    what = f"{case}, {rows} rows"
    for number in range(options.rounds):
        step(f"{what}: round {number + 1}")
        read = limit.ask(
            "read", urgent=options.urgent, nbytes=options.rotated, seconds=options.seconds
        )
        reads.append(read["bytes"] / statistics.median(read["seconds"]))
        for process in list(runs):
            answer = _ask(
                process,
                report,
                what,
                "time",
                urgent=options.urgent,
                rows=rows,
                seconds=options.seconds,
                limit=options.limit,
            )
            if answer is None:
                runs.remove(process)
                lines[process.contender.name].rounds.clear()
            else:
                lines[process.contender.name].rounds.append(answer["seconds"])
    report.reads[case, rows] = reads


def _ask(
    process: Process, report: Report, what: str, do: str, **given: Any
) -> dict[str, Any] | None:
    """An answer; None where the contender refuses, or where a peer fails. Ours may only refuse."""
    name = process.contender.name
    try:
        answer = process.ask(do, **given)
    except BenchError as error:
        if name in report.options.kernels:
            raise
        report.refused.append((name, what, error.found))
        return None
    if "refused" in answer:
        report.refused.append((name, what, str(answer["refused"])))
        return None
    return answer


def lines_of(report: Report, own: bool) -> Sequence[Line]:
    """The lines of our kernels, or those of the others."""
    return [line for line in report.lines if line.own == own]
