"""How long compiling takes, stage by stage, and how that grows with the layers.

Comes in: a checkpoint, or numbers of layers of a model that is written for it. Goes out: a report:
seconds of each stage and pass.
Always holds: every run is a process of its own with an empty folder for what Inductor compiles; one
prompt and one token are run, which are the two graphs that ``generate`` needs.
"""

from __future__ import annotations

import datetime
import math
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qcompile.bench.machine import machine
from qcompile.bench.model_process import started
from qcompile.bench.peers import Contender
from qcompile.bench.synthetic import Shape, write

# A narrow model: what is compiled is the same, and weights are no part of the question.
NARROW = Shape(layers=2, hidden=512, inner=1536, heads=8, vocabulary=8192, context=1024)
Step = Callable[[str], object]


@dataclass(frozen=True)
class Options:
    """What is measured.

    Attributes:
        file: a checkpoint, or None for models of ``layers`` layers each.
        layers: numbers of layers.
        dtype, numerics: qcompile's.
        rounds: runs of each, of which the medians are shown.
        threads, urgent: as for kernels.
    """

    file: str | None
    layers: tuple[int, ...]
    dtype: str
    numerics: str
    rounds: int
    threads: int
    urgent: bool


@dataclass
class Run:
    """One model: seconds of each stage in every round, in the order of the stages."""

    name: str
    layers: int | None
    stages: dict[str, list[float]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def seconds(self, stage: str) -> float:
        """The median over rounds."""
        return statistics.median(self.stages.get(stage, [0.0]))


@dataclass
class Report:
    """The runs, fewest layers first."""

    options: Options
    machine: dict[str, object]
    date: str
    versions: dict[str, str] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)

    def exponent(self, stage: str) -> float | None:
        """The power of the number of layers with which a stage grew between the two largest models.

        1 is linear, 0 does not grow; None with fewer than two models, or below a millisecond.
        """
        if len(self.runs) < 2:
            return None
        less, more = self.runs[-2:]
        assert less.layers is not None
        assert more.layers is not None
        times = less.seconds(stage), more.seconds(stage)
        if min(times) < 1e-3:
            return None
        return math.log(times[1] / times[0]) / math.log(more.layers / less.layers)

    def a_layer(self, stage: str) -> float | None:
        """Seconds that a further layer took between the two largest models."""
        if len(self.runs) < 2:
            return None
        less, more = self.runs[-2:]
        assert less.layers is not None
        assert more.layers is not None
        return (more.seconds(stage) - less.seconds(stage)) / (more.layers - less.layers)


def steps(options: Options) -> int:
    """How often ``measure`` reports."""
    return options.rounds * (1 if options.file else len(options.layers))


def measure(options: Options, step: Step = lambda what: None) -> Report:
    """Compile every model.

    Raises:
        BenchError: one of them failed.
    """
    report = Report(options, machine(), datetime.date.today().isoformat())
    with tempfile.TemporaryDirectory() as folder:
        if options.file is not None:
            runs = [(Run(Path(options.file).name, None), options.file)]
        else:
            runs = [_written(layers, folder) for layers in sorted(options.layers)]
        for number in range(options.rounds):
            for run, file in runs:
                step(f"{run.name}, round {number + 1}")
                _once(run, file, options, report)
    report.runs = [run for run, _ in runs]
    return report


def _written(layers: int, folder: str) -> tuple[Run, str]:
    from dataclasses import replace

    path = Path(folder) / f"{layers}.gguf"
    write(path, replace(NARROW, layers=layers))
    return Run(f"{layers} layers", layers), str(path)


def _once(run: Run, file: str, options: Options, report: Report) -> None:
    code = "from qcompile.bench.workers.own_compile import main; main()"
    contender = Contender(run.name, (sys.executable, "-c", code), True, "")
    with (
        tempfile.TemporaryDirectory() as cache,
        started(contender, options.threads, {"TORCHINDUCTOR_CACHE_DIR": cache}) as process,
    ):
        given: dict[str, Any] = {"dtype": options.dtype, "numerics": options.numerics}
        found = process.ask("compile", urgent=options.urgent, file=file, **given)
    report.versions = found["versions"]
    run.counts = found["counts"]
    for stage, seconds in found["stages"].items():
        run.stages.setdefault(stage, []).append(seconds)
