"""A model's speed, memory and outputs beside those of peers.

Comes in: a checkpoint and options. Goes out: a report of every contender's figures.
Always holds: contenders run in processes of their own, on the same token ids, with the same number
of threads; rounds take turns, so that a busy machine slows all of them; compiling is not timed as
prefill or decode; a peer that could not be measured is in the report with the reason.
"""

from __future__ import annotations

import contextlib
import datetime
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from qcompile.bench.machine import machine
from qcompile.bench.model_process import BenchError, Process, started
from qcompile.bench.peers import Contender, Missing, own_contenders, peers, reference

_WARM = 2  # runs before the first round: the second still compiles where shapes became symbols


class Size(NamedTuple):
    """Tokens of a prompt, and how many prompts at once."""

    prompt: int
    batch: int


@dataclass(frozen=True)
class Options:
    """What is measured.

    Attributes:
        file: a checkpoint.
        device: where qcompile runs; peers run on the CPU.
        against: names of peers.
        prompts: lengths of prompts.
        tokens: tokens that follow one.
        batches: numbers of sequences at once.
        dtype, numerics: qcompile's.
        rounds: of turns.
        threads: of each contender.
        compared: tokens of text on which outputs are compared; 0 leaves the comparison out.
        urgent: measure with real-time priority (Linux, needs the right to).
        exported: measure the model as ``qcompile export`` saves it, too.
    """

    file: str
    device: str = "cpu"
    against: tuple[str, ...] = ("llama.cpp", "transformers")
    prompts: tuple[int, ...] = (512,)
    tokens: int = 64
    batches: tuple[int, ...] = (1,)
    dtype: str = "float32"
    numerics: str = "exact"
    rounds: int = 5
    threads: int = 1
    compared: int = 128
    urgent: bool = False
    exported: bool = False

    @property
    def sizes(self) -> list[Size]:
        """What is run: every length with every number of sequences."""
        return [Size(prompt, batch) for prompt in self.prompts for batch in self.batches]


@dataclass
class Figures:
    """What one contender measured. Rates hold tokens a second, one for each round, by size."""

    name: str
    note: str
    load: float = 0.0
    imports: float = 0.0
    baseline: int = 0
    weights: int = 0
    compile: float = 0.0
    peak: int = 0
    top1: float | None = None
    kl: float | None = None
    prefill: dict[Size, list[float]] = field(default_factory=dict)
    decode: dict[Size, list[float]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)


@dataclass
class Report:
    """The figures of all contenders, ours first."""

    options: Options
    machine: dict[str, object]
    date: str
    contenders: list[Figures]
    missing: list[Missing]


Step = Callable[[str], object]


def steps(options: Options) -> int:
    """How often ``measure`` reports at most."""
    contenders = 1 + options.exported + len(options.against)
    parts = 2 + len(options.sizes) * (1 + options.rounds)
    return contenders * parts + (1 if options.compared else 0)


def measure(options: Options, step: Step = lambda what: None) -> Report:
    """Run the contenders.

    Args:
        options: what to measure.
        step: called before each part with its name.

    Raises:
        BenchError: qcompile itself failed; a peer's failure is in the report.
    """
    chosen = peers(options.against, options.file, options.device)
    missing = [found for found in chosen if isinstance(found, Missing)]
    own = own_contenders(options.dtype, options.numerics, options.exported)
    date = datetime.date.today().isoformat()
    report = Report(options, machine(), date, [], missing)
    with contextlib.ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        runs = []
        for contender in (*own, *(c for c in chosen if isinstance(c, Contender))):
            process = stack.enter_context(started(contender, options.threads))
            runs.append(_Run(process, Figures(contender.name, contender.note)))
        _measure(runs, report, folder, step)
        report.contenders = [run.figures for run in runs]
    return report


@dataclass
class _Run:
    process: Process
    figures: Figures
    facts: dict[str, Any] = field(default_factory=dict)


def _measure(runs: list[_Run], report: Report, folder: str, step: Step) -> None:
    """Load, warm, measure in turns, compare. Peers that fail leave ``runs``."""
    options = report.options
    _each(runs, report, step, "loading", lambda run: _load(run, options))
    vocabulary, text = runs[0].facts["vocabulary"], runs[0].facts["text"]
    for size in options.sizes:
        ids = prompts(vocabulary, size.batch, size.prompt)

        def warm(run: _Run, ids: list[list[int]] = ids) -> None:
            _warm(run, ids, options.tokens)

        def once(run: _Run, ids: list[list[int]] = ids, size: Size = size) -> None:
            _round(run, ids, size, options)

        able, what = _able(runs, size.batch), f"{size.batch} x {size.prompt} tokens"
        _each(able, report, step, f"compiling for {what}", warm)
        for number in range(options.rounds):
            _each(able, report, step, f"{what}, round {number + 1}", once)
        runs[:] = [run for run in runs if run.figures.name not in _failed(report)]
    _each(runs, report, step, "memory", _peak)
    if options.compared:
        step("float32 reference")
        _compare(runs, report, text[: options.compared], Path(folder))


def _each(
    runs: list[_Run], report: Report, step: Step, what: str, do: Callable[[_Run], None]
) -> None:
    """Do the same for each; a peer that fails is noted and leaves, ours raises."""
    for run in list(runs):
        step(f"{run.figures.name}: {what}")
        try:
            do(run)
        except BenchError as error:
            if run.process.contender.own:
                raise
            report.missing.append(Missing(run.figures.name, str(error)))
            runs.remove(run)


def _failed(report: Report) -> set[str]:
    return {missing.name for missing in report.missing}


def _able(runs: Sequence[_Run], batch: int) -> list[_Run]:
    return [run for run in runs if batch == 1 or run.process.contender.batches]


def prompts(vocabulary: int, batch: int, length: int) -> list[list[int]]:
    """Token ids, the same in every process; without the first and the rarest of a vocabulary."""
    draw = random.Random(batch)
    low, high = vocabulary // 10, vocabulary // 2
    return [[draw.randrange(low, high) for _ in range(length)] for _ in range(batch)]


# **** one contender ****


def _load(run: _Run, options: Options) -> None:
    context = 1 << (max(options.prompts) + options.tokens).bit_length()
    run.facts = run.process.ask(
        "load",
        urgent=options.urgent,
        file=options.file,
        device=options.device,
        dtype=options.dtype,
        numerics=options.numerics,
        context=max(context, options.compared + 8),
        threads=options.threads,
    )
    facts, figures = run.facts, run.figures
    if "refused" in facts:
        raise BenchError(
            f"{figures.name}, load",
            str(facts["refused"]),
            "a checkpoint that it can run",
            "leave it out of --against",
        )
    figures.load, figures.imports = facts["seconds"], facts["import_seconds"]
    figures.weights, figures.versions = facts["weights"], facts["versions"]
    figures.baseline, figures.compile = facts["baseline"], facts.get("compile_seconds", 0.0)


def _warm(run: _Run, ids: list[list[int]], tokens: int) -> None:
    """Add what the first runs take longer than later ones: that is compiling."""
    begin = time.perf_counter()
    for _ in range(_WARM):
        run.process.ask("run", ids=ids, tokens=tokens)
    seconds = time.perf_counter() - begin
    last = run.process.ask("run", ids=ids, tokens=tokens)
    run.figures.compile += max(0.0, seconds - _WARM * float(last["prefill"] + last["decode"]))


def _round(run: _Run, ids: list[list[int]], size: Size, options: Options) -> None:
    figures, (prompt, batch) = run.figures, size
    found = run.process.ask("run", urgent=options.urgent, ids=ids, tokens=options.tokens)
    figures.prefill.setdefault(size, []).append(batch * prompt / found["prefill"])
    made = batch * (options.tokens - 1)
    figures.decode.setdefault(size, []).append(made / found["decode"])


def _peak(run: _Run) -> None:
    run.figures.peak = run.process.ask("memory")["peak"]


# **** outputs ****


def _compare(runs: list[_Run], report: Report, ids: list[int], folder: Path) -> None:
    """Compare logits over the text with those of the float32 model."""
    import numpy as np
    import torch

    from qcompile.bench.accuracy import divergence

    options = report.options
    path = folder / "reference.npy"
    with started(reference(), options.threads) as process:
        process.ask("load", file=options.file, device="cpu", dtype="float32", numerics="exact")
        process.ask("logits", ids=ids, out=str(path))
    expected = torch.from_numpy(np.load(path))

    def compare(run: _Run) -> None:
        out = folder / "logits.npy"
        run.process.ask("logits", ids=ids, out=str(out))
        found = torch.from_numpy(np.load(out))
        run.figures.kl = divergence(expected, found).mean().item()
        same = expected.argmax(-1) == found.argmax(-1)
        run.figures.top1 = same.double().mean().item()

    _each(runs, report, lambda what: None, "logits", compare)


def ratios(own: Figures, peer: Figures, size: Size) -> tuple[float, float] | None:
    """How many times as fast ours is, prefill and decode: medians over rounds of their ratios."""
    if size not in own.prefill or size not in peer.prefill:
        return None
    pairs = ((own.prefill, peer.prefill), (own.decode, peer.decode))
    prefill, decode = (
        statistics.median(a / b for a, b in zip(x[size], y[size], strict=True)) for x, y in pairs
    )
    return prefill, decode
