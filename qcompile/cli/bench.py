"""``qcompile bench``: figures of a model, of kernels, of repacking and of compiling.

Comes in: arguments. Goes out: tables; JSON, Markdown and plots where they are asked for.
Always holds: contenders take turns, in processes of their own; figures of kernels that are compiled
ahead of time say that nothing was timed.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from qcompile.cli.bench_options import (
    allowed_urgency,
    at_least,
    bar,
    check_numerics,
    check_places,
    check_saves_code,
    need,
    numbers,
    refuse,
    shapes,
    words,
    write,
)
from qcompile.cli.generate import dtype_of
from qcompile.cli.screen import width
from qcompile.errors import OptionError, nearest

if TYPE_CHECKING:
    from qcompile.bench import compiling, experts, kernel_run, model, transforms

# What --quick stands for: prompt tokens, new tokens, rounds, tokens on which outputs are compared.
_FULL, _QUICK = (512, 64, 5, 128), (128, 16, 3, 32)


def run_model(arguments: argparse.Namespace) -> int:
    """Measure a model beside its peers."""
    from qcompile.bench import model, model_plots, model_table

    check_places(arguments)
    options = _model_options(arguments)
    with bar(model.steps(options)) as step:
        report = model.measure(options, step)
    print(model_table.text(report))
    write(
        arguments,
        lambda: model_table.record(report),
        lambda: model_table.markdown(report),
        lambda folder: model_plots.write(report, folder),
    )
    return 0


def _model_options(arguments: argparse.Namespace) -> model.Options:
    from qcompile.bench.machine import cores
    from qcompile.bench.model import Options
    from qcompile.bench.peers import expanded

    prompt, tokens, rounds, compared = _QUICK if arguments.quick else _FULL
    # Compiling transformers' model takes longer than all the rest of a quick run.
    against = ("llama.cpp",) if arguments.quick else ("llama.cpp", "transformers")
    given = Options(
        file=arguments.file,
        device=arguments.device,
        against=expanded(words(arguments.against, against)),
        prompts=numbers(arguments.prompt_tokens, (prompt,), "--prompt-tokens"),
        tokens=at_least(arguments.tokens, tokens, 2, "--tokens"),
        batches=numbers(arguments.batch, (1,), "--batch"),
        dtype=arguments.dtype,
        numerics=check_numerics(arguments.numerics),
        rounds=at_least(arguments.rounds, rounds, 1, "--rounds"),
        threads=at_least(arguments.threads, cores(), 1, "--threads"),
        compared=at_least(arguments.compared, compared, 0, "--compared"),
        urgent=allowed_urgency(arguments),
        exported=arguments.exported,
    )
    dtype_of(given.dtype)
    need(given.file)
    if given.exported:
        check_saves_code(given.device)
    return given


# **** kernels ****


def run_kernels(arguments: argparse.Namespace) -> int:
    """Time kernels; with ``--aot`` print what kernels for a GPU need, 1 where a rule is broken."""
    if arguments.aot:
        from qcompile.bench.kernels import report as compiled

        timed = ("file", "kernel", "formats", "shapes", "rows", "against", "rounds", "threads")
        refuse(arguments, (*timed, "quick", "urgent", "markdown", "plots"), "with --aot")
        return compiled(arguments.arch or (), arguments.only, arguments.json)
    from qcompile.bench import holds, kernel_plots, kernel_run, kernel_table

    refuse(arguments, ("arch", "only"), "without --aot")
    check_places(arguments)
    options, left = _kernel_options(arguments)
    with bar(kernel_run.steps(options)) as step:
        report = kernel_run.measure(options, step)
    report.left = left
    print(kernel_table.text(report, width()))
    claims = holds.of_kernels(report)
    if claims:
        print(f"\n{holds.text(claims)}")
    write(
        arguments,
        lambda: kernel_table.record(report),
        lambda: "\n\n".join(
            [kernel_table.markdown(report), *([holds.markdown(claims)] if claims else [])]
        ),
        lambda folder: kernel_plots.write(report, folder),
    )
    return 0


def _kernel_options(arguments: argparse.Namespace) -> tuple[kernel_run.Options, list[str]]:
    """The options, and what a checkpoint has that no format describes."""
    from qcompile.bench import kernel_cases as usual
    from qcompile.bench.formats import check_name
    from qcompile.bench.kernel_peers import NAMES, QUICK
    from qcompile.bench.kernel_run import Options
    from qcompile.bench.machine import cores

    device, quick = _cpu(arguments.device), arguments.quick
    numerics = words(arguments.numerics, ())
    kernels = usual.chosen("cpu", words(arguments.kernel, ()), numerics)
    if arguments.file:
        refuse(arguments, ("formats", "shapes"), "beside a file, whose weights are measured")
        cases, left = usual.cases_of_file(need(arguments.file), device)
        kinds = {kernel.kind for kernel in kernels}
        cases = [case for case in cases if case.kind in kinds]
    else:
        formats = words(arguments.formats, usual.QUICK_FORMATS if quick else usual.FORMATS)
        for name in formats:
            check_name(name)
        sides = shapes(arguments.shapes, usual.QUICK_SHAPES if quick else usual.SHAPES, "--shapes")
        cases, left = usual.cases(kernels, formats, sides, quick), []
    given = Options(
        device=device,
        kernels=tuple(kernel.name for kernel in kernels),
        cases=tuple(cases),
        rows=numbers(arguments.rows, usual.QUICK_ROWS if quick else usual.ROWS, "--rows"),
        against=words(arguments.against, QUICK if quick else NAMES),
        dtype=_float_dtype(arguments.dtype),
        rounds=at_least(arguments.rounds, 3 if quick else 5, 1, "--rounds"),
        seconds=0.05 if quick else 0.2,
        rotated=(120 if quick else 640) << 20,
        limit=0.5 if quick else 3.0,
        threads=at_least(arguments.threads, cores(), 1, "--threads"),
        urgent=allowed_urgency(arguments),
    )
    return given, left


def _float_dtype(name: str) -> str:
    dtype_of(name)
    return name


def _cpu(device: str) -> str:
    """A target of kind ``cpu``."""
    from qcompile.target import Target

    target = Target.parse(device)
    if target.kind == "cpu":
        return device
    raise OptionError(
        f"--device {device}",
        "kernels are timed beside their peers on a CPU only",
        "cpu, or cpu with an architecture",
        "run python -m qcompile.bench.device on a machine with a GPU, or use --aot",
    )


# **** repacking, compiling, experts ****


def run_transforms(arguments: argparse.Namespace) -> int:
    """Time the edges to the CPU's layout."""
    from qcompile.bench import holds, transforms

    check_places(arguments)
    options = _transform_options(arguments)
    with bar(transforms.steps(options)) as step:
        report = transforms.measure(options, step)
    claims = transforms.claims(report)
    print(transforms.text(report))
    if claims:
        print(f"\n{holds.text(claims)}")
    write(
        arguments,
        lambda: transforms.record(report),
        lambda: "\n\n".join([transforms.markdown(report), holds.markdown(claims)]),
    )
    return 0


def _transform_options(arguments: argparse.Namespace) -> transforms.Options:
    from qcompile.bench.machine import cores
    from qcompile.bench.transforms import QUICK, SHAPE, Options, every_format

    quick = arguments.quick
    [shape] = shapes(arguments.shape, ((1024, 14336),) if quick else (SHAPE,), "--shape")[:1]
    for name in arguments.formats:
        if name not in every_format():
            raise OptionError(
                name,
                "no such format",
                f"some of {', '.join(every_format())}",
                f"name a known format{nearest(name, every_format())}",
            )
    return Options(
        formats=tuple(arguments.formats) or (QUICK if quick else every_format()),
        shape=shape,
        copies=2 if quick else 4,
        ggml=arguments.ggml,
        rounds=at_least(arguments.rounds, 3 if quick else 5, 1, "--rounds"),
        threads=at_least(arguments.threads, cores(), 1, "--threads"),
        urgent=allowed_urgency(arguments),
    )


def run_compile(arguments: argparse.Namespace) -> int:
    """Time the stages of compiling."""
    from qcompile.bench import compiling, compiling_table

    check_places(arguments)
    options = _compile_options(arguments)
    with bar(compiling.steps(options)) as step:
        report = compiling.measure(options, step)
    print(compiling_table.text(report))
    write(
        arguments,
        lambda: compiling_table.record(report),
        lambda: compiling_table.markdown(report),
    )
    return 0


def _compile_options(arguments: argparse.Namespace) -> compiling.Options:
    from qcompile.bench.compiling import Options
    from qcompile.bench.machine import cores

    dtype_of(arguments.dtype)
    if arguments.file:
        refuse(arguments, ("layers",), "beside a file, which is compiled")
    return Options(
        file=None if arguments.file is None else need(arguments.file),
        layers=numbers(arguments.layers, (2, 8) if arguments.quick else (2, 4, 8, 16), "--layers"),
        dtype=arguments.dtype,
        numerics=check_numerics(arguments.numerics),
        rounds=at_least(arguments.rounds, 1 if arguments.quick else 3, 1, "--rounds"),
        threads=at_least(arguments.threads, cores(), 1, "--threads"),
        urgent=allowed_urgency(arguments),
    )


def run_experts(arguments: argparse.Namespace) -> int:
    """Time a layer of experts."""
    from qcompile.bench import experts

    check_places(arguments)
    options = _expert_options(arguments)
    with bar(experts.steps(options)) as step:
        report = experts.measure(options, step)
    print(experts.text(report))
    write(arguments, lambda: experts.record(report), lambda: experts.markdown(report))
    return 0


def _expert_options(arguments: argparse.Namespace) -> experts.Options:
    from qcompile.bench.experts import SPECS, Options
    from qcompile.bench.machine import cores

    quick = arguments.quick
    return Options(
        formats=tuple(SPECS)[:1] if quick else tuple(SPECS),
        experts=32 if quick else 128,
        tokens=numbers(arguments.tokens, (1, 128), "--tokens"),
        rounds=at_least(arguments.rounds, 5 if quick else 15, 1, "--rounds"),
        threads=at_least(arguments.threads, cores(), 1, "--threads"),
        urgent=allowed_urgency(arguments),
    )
