"""What the report measures, section by section.

Comes in: settings. Goes out: a summary for the README, whole tables, a record.
Always holds: a section is what its command of ``qcompile bench`` measures with the options that its
heading names; *quick* shortens every one of them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qcompile.bench import holds
from qcompile.bench.machine import cores
from qcompile.cli.bench_options import bar


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Attributes:
        quick: small models, few formats and rounds.
        urgent: with real-time priority.
        gemma: Gemma 3 270M as a GGUF file; None for the demo's.
        large: a file of Qwen2 1.5B's shape; None to write one.
        folder: where that is written.
    """

    quick: bool
    urgent: bool
    gemma: str | None
    large: str | None
    folder: str


@dataclass(frozen=True)
class Measured:
    """One section."""

    title: str
    summary: str
    details: str
    record: Any


Section = Callable[[Settings], Measured]


def model(settings: Settings) -> Measured:
    """Gemma beside llama.cpp and transformers."""
    from qcompile.cli.demo import demo_model

    file = settings.gemma or str(demo_model())
    return _model(settings, "Gemma 3 270M Q4_K_M", file, 24 if settings.quick else 64)


def large(settings: Settings) -> Measured:
    """Random weights in the shape of Qwen2 1.5B; a small shape when quick."""
    from qcompile.bench.synthetic import Shape, write

    small = Shape(layers=8, hidden=512, inner=1536, heads=8, vocabulary=8192, context=1024)
    title = "Qwen2 1.5B's shape, Q4_K_M"
    if settings.large is not None:
        return _model(settings, title, settings.large, 24)
    with tempfile.TemporaryDirectory(dir=settings.folder) as folder:
        path = Path(folder) / ("qwen2-small.gguf" if settings.quick else "qwen2-1.5b.gguf")
        write(path, small if settings.quick else Shape())
        return _model(settings, title, str(path), 24)


def _model(settings: Settings, title: str, file: str, tokens: int) -> Measured:
    from qcompile.bench import model_table
    from qcompile.bench.model import Options, measure, steps

    quick = settings.quick
    options = Options(
        file=file,
        against=("llama.cpp",) if quick else ("llama.cpp", "transformers"),
        prompts=(64,) if quick else (512,),
        tokens=8 if quick else tokens,
        dtype="bfloat16",
        numerics="fast",
        rounds=2 if quick else 5,
        threads=cores(),
        compared=0 if quick else 128,
        urgent=settings.urgent,
        exported=not quick,
    )
    with bar(steps(options)) as step:
        found = measure(options, step)
    shown = model_table.markdown(found).replace(file, Path(file).name)
    return Measured(title, shown, shown, model_table.record(found))


def kernels(settings: Settings) -> Measured:
    """Linears of five formats; the summary is a line a weight and kernel."""
    from qcompile.bench import kernel_cases, kernel_table
    from qcompile.bench.kernel_peers import NAMES, QUICK
    from qcompile.bench.kernel_run import Options, measure, steps

    quick = settings.quick
    shapes = ((1024, 2048),) if quick else kernel_cases.SHAPES
    formats = ("4-bit g128", "q4_k") if quick else holds.STREAMED
    ours = [k for k in kernel_cases.chosen("cpu", (), ("exact", "fast")) if k.kind == "linear"]
    options = Options(
        device="cpu",
        kernels=tuple(kernel.name for kernel in ours),
        cases=tuple(kernel_cases.cases(tuple(ours), formats, shapes)),
        rows=(1, 8) if quick else kernel_cases.ROWS,
        against=QUICK if quick else NAMES,
        dtype="bfloat16",
        rounds=2 if quick else 5,
        seconds=0.02 if quick else 0.2,
        rotated=(60 if quick else 640) << 20,
        limit=0.5 if quick else 3.0,
        threads=cores(),
        urgent=settings.urgent,
    )
    with bar(steps(options)) as step:
        found = measure(options, step)
    claims = holds.markdown(holds.of_kernels(found))
    details = f"{kernel_table.markdown(found)}\n\n{claims}"
    record = kernel_table.record(found)
    return Measured("Linears", kernel_table.summary(found), details, record)


def transforms(settings: Settings) -> Measured:
    """Repacking."""
    from qcompile.bench import transforms as bench

    options = bench.Options(
        formats=bench.QUICK,
        shape=(256, 4096) if settings.quick else bench.SHAPE,
        copies=2 if settings.quick else 4,
        ggml=None,
        rounds=2 if settings.quick else 5,
        threads=cores(),
        urgent=settings.urgent,
    )
    with bar(bench.steps(options)) as step:
        found = bench.measure(options, step)
    shown = bench.markdown(found)
    details = f"{shown}\n\n{holds.markdown(bench.claims(found))}"
    return Measured("Repacking", shown, details, bench.record(found))


def experts(settings: Settings) -> Measured:
    """A layer of experts."""
    from qcompile.bench import experts as bench

    options = bench.Options(
        formats=tuple(bench.SPECS)[:1] if settings.quick else tuple(bench.SPECS),
        experts=16 if settings.quick else 128,
        tokens=(1, 16) if settings.quick else (1, 128),
        rounds=3 if settings.quick else 15,
        threads=cores(),
        urgent=settings.urgent,
    )
    with bar(bench.steps(options)) as step:
        found = bench.measure(options, step)
    shown = bench.markdown(found)
    return Measured("A layer of experts", shown, shown, bench.record(found))


def compiling(settings: Settings) -> Measured:
    """Compile times and their growth."""
    from qcompile.bench import compiling as bench
    from qcompile.bench import compiling_table

    options = bench.Options(
        file=None,
        layers=(1, 2) if settings.quick else (2, 4, 8, 16),
        dtype="float32",
        numerics="exact",
        rounds=1 if settings.quick else 3,
        threads=cores(),
        urgent=settings.urgent,
    )
    with bar(bench.steps(options)) as step:
        found = bench.measure(options, step)
    shown = compiling_table.markdown(found)
    return Measured("Compiling", shown, shown, compiling_table.record(found))


SECTIONS: dict[str, Section] = {
    "model": model,
    "large model": large,
    "kernels": kernels,
    "transforms": transforms,
    "experts": experts,
    "compile": compiling,
}
