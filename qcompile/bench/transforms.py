"""How fast stored weights become the CPU kernels' layout, beside other decoders of the same bytes.

Comes in: options. Goes out: a report: stored GB a second, by format and way (see
``workers.own_transforms``).
Always holds: ways of a format take turns over the same weights, in one process of pinned threads;
ratios are medians over rounds of the ratio within a round.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qcompile.bench.formats import WORDS, gguf_names
from qcompile.bench.holds import Claim
from qcompile.bench.machine import machine, versions
from qcompile.bench.model_process import Process, started
from qcompile.bench.peers import INTERPRETER, Contender, library_folder
from qcompile.bench.tables import Row, aligned, heading, piped, short, urgent

SHAPE = (4096, 14336)
QUICK = ("q4_k", "q5_0", "q6_k", "q8_0", "gptq 4-bit")
WAYS = ("edge", "pack", "codes", "gguf", "ggml")
_HEAD = ("format", *(f"{way} GB/s" for way in WAYS), "edge / gguf", "edge / ggml")
# What the CPU's edges have to reach: times as fast as numpy, and as ggml.
_HELD, _NUMPY, _GGML = ("q4_k", "q5_0", "q6_k", "q8_0"), 20.0, 1.0
Step = Callable[[str], object]


@dataclass(frozen=True)
class Options:
    """What is measured.

    Attributes:
        formats: names.
        shape: of weights.
        copies: of a weight, which are gone round.
        ggml: a build of libggml-base; None for that of ``QCOMPILE_LLAMA_CPP_PYTHON``, if any.
        rounds, threads, urgent: as for kernels.
    """

    formats: tuple[str, ...]
    shape: tuple[int, int]
    copies: int
    ggml: str | None
    rounds: int
    threads: int
    urgent: bool


@dataclass
class Report:
    """Rates in bytes a second, one for each round, by format and way."""

    options: Options
    machine: dict[str, object]
    date: str
    versions: dict[str, str]
    rates: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    ggml: str = ""

    def ratio(self, format: str, peer: str) -> float | None:
        """How many times as fast as a peer the edge is."""
        rates = self.rates.get(format, {})
        if peer not in rates:
            return None
        pairs = zip(rates["edge"], rates[peer], strict=True)
        return statistics.median(edge / other for edge, other in pairs)


def every_format() -> tuple[str, ...]:
    """GGUF's types and the words of the other schemes."""
    return (*gguf_names(), *WORDS)


def steps(options: Options) -> int:
    """How often ``measure`` reports."""
    return len(options.formats) * (1 + options.rounds)


def measure(options: Options, step: Step = lambda what: None) -> Report:
    """Time every format."""
    found = Report(options, machine(), datetime.date.today().isoformat(), versions("gguf", "numpy"))
    found.ggml = _library(options.ggml)
    module = "qcompile.bench.workers.own_transforms"
    code = f"import sys; from {module} import main; main(sys.argv[1])"
    worker = Contender("transforms", (sys.executable, "-c", code, found.ggml), True, "")
    with started(worker, options.threads) as process:
        for format in options.formats:
            step(f"{format}: making weights")
            _format(process, format, found, step)
    return found


def _format(process: Process, format: str, report: Report, step: Step) -> None:
    options, (n, k) = report.options, report.options.shape
    made = process.ask("prepare", format=format, n=n, k=k, copies=options.copies)
    if "refused" in made:
        report.refused[format] = made["refused"]
        return
    process.ask("touch")
    rates: dict[str, list[float]] = {way: [] for way in made["ways"]}
    for number in range(options.rounds):
        step(f"{format}: round {number + 1}")
        for way, found in rates.items():
            answer = process.ask("time", urgent=options.urgent, way=way, seconds=0.1)
            found.append(made["bytes"] / statistics.median(answer["seconds"]))
    report.rates[format] = rates


def _library(given: str | None) -> str:
    """The file of libggml-base; empty where there is none."""
    if given is not None:
        return given
    folder = library_folder(os.environ.get(INTERPRETER) or sys.executable)
    if folder is None:
        return ""
    found = sorted(Path(folder).glob("*ggml-base.*"))
    return str(found[0]) if found else ""


def claims(report: Report) -> list[Claim]:
    """What the edges have to reach."""
    made = []
    for format in (name for name in _HELD if name in report.rates):
        work = f"{format} to cpu.panel"
        made.append(Claim(work, "gguf.dequantize (numpy)", _NUMPY, report.ratio(format, "gguf")))
        made.append(Claim(work, "ggml's to_float", _GGML, report.ratio(format, "ggml")))
    return made


# **** tables ****


def text(report: Report) -> str:
    """The table for a terminal."""
    n, k = report.options.shape
    head = f"{n} x {k}, {report.options.threads} threads: GB of stored bytes a second, medians"
    return "\n".join([head, "", *aligned(_rows(report)), *("", *_absent(report))]).rstrip()


def markdown(report: Report) -> str:
    """The same with the command, machine, versions and date."""
    options, (n, k) = report.options, report.options.shape
    how = f"{options.threads} threads, {n} x {k}, medians of {options.rounds} rounds in turns"
    given = (command(options), report.date, report.machine, report.versions)
    return "\n".join([*heading(*given, how, _absent(report)), *piped(_rows(report))])


def record(report: Report) -> dict[str, Any]:
    """Everything that was measured."""
    return {"command": command(report.options), **dataclasses.asdict(report)}


def command(options: Options) -> str:
    """The command line that measures the same."""
    formats = " ".join(f'"{name}"' if " " in name else name for name in options.formats)
    shape = "x".join(map(str, options.shape))
    return (
        f"qcompile bench transforms {formats} --shape {shape} --rounds {options.rounds} "
        f"--threads {options.threads}{urgent(options)}"
    )


def _rows(report: Report) -> list[Row]:
    rows: list[Row] = [_HEAD]
    for format, rates in report.rates.items():
        figures = (short(statistics.median(rates[w]) / 1e9) if w in rates else "-" for w in WAYS)
        rows.append((format, *figures, *_factors(report, format)))
    return rows


def _factors(report: Report, format: str) -> Iterator[str]:
    for peer in ("gguf", "ggml"):
        factor = report.ratio(format, peer)
        yield "-" if factor is None else short(factor)


def _absent(report: Report) -> Iterable[str]:
    if not report.ggml:
        yield (
            "ggml, not measured: no libggml-base; pip install llama-cpp-python, or name the "
            f"interpreter that has it in {INTERPRETER}"
        )
    reasons: dict[str, list[str]] = {}
    for format, why in report.refused.items():
        # The layout's name says the format once more.
        reasons.setdefault(why.replace(f"gguf.{format}", "it"), []).append(format)
    for why, formats in reasons.items():
        yield f"{', '.join(formats)}: {why}"
