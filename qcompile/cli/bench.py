"""``qcompile bench``: figures of kernels, and of a model beside its peers.

Comes in: arguments. Goes out: tables; JSON, Markdown and plots where they are asked for.
Always holds: figures of kernels that are compiled ahead of time say that nothing was timed; a
model's are of contenders that took turns.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from qcompile.cli.generate import dtype_of
from qcompile.errors import OptionError

# What --quick stands for: prompt tokens, new tokens, rounds, tokens on which outputs are compared.
_FULL, _QUICK = (512, 64, 5, 128), (128, 16, 3, 32)


def run_kernels(arguments: argparse.Namespace) -> int:
    """Print the figures of kernels that are compiled ahead of time; 1 where a rule is broken."""
    if not arguments.aot:
        raise OptionError(
            "qcompile bench kernels",
            "no --aot",
            "--aot: kernels are compiled here, and timed only by a script of their own",
            "add --aot, or run python -m qcompile.bench.linear to time those of this CPU",
        )
    from qcompile.bench.kernels import report

    return report(arguments.arch or (), arguments.only, arguments.json)


def run_model(arguments: argparse.Namespace) -> int:
    """Measure a model beside its peers."""
    from tqdm import tqdm

    from qcompile.bench import model, model_table
    from qcompile.cli.screen import say

    options = _options(arguments)
    with tqdm(total=model.steps(options), unit="step", disable=None, leave=False) as bar:

        def step(what: str) -> None:
            bar.set_description_str(what)
            bar.update()

        report = model.measure(options, step)
    print(model_table.text(report))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(model_table.record(report), indent=1) + "\n")
    if arguments.markdown:
        Path(arguments.markdown).write_text(model_table.markdown(report) + "\n", encoding="utf-8")
    if arguments.plots:
        from qcompile.bench.model_plots import write

        for path in write(report, arguments.plots):
            say(f"wrote {path}")
    return 0


def _options(arguments: argparse.Namespace) -> Any:
    from qcompile.bench.machine import cores
    from qcompile.bench.model import Options
    from qcompile.bench.model_process import may_be_urgent

    prompt, tokens, rounds, compared = _QUICK if arguments.quick else _FULL
    given = Options(
        file=arguments.file,
        device=arguments.device,
        against=_names(arguments),
        prompt=_at_least(arguments.prompt_tokens, prompt, 1, "--prompt-tokens"),
        tokens=_at_least(arguments.tokens, tokens, 2, "--tokens"),
        batches=_batches(arguments.batch),
        dtype=arguments.dtype,
        numerics=arguments.numerics,
        rounds=_at_least(arguments.rounds, rounds, 1, "--rounds"),
        threads=_at_least(arguments.threads, cores(), 1, "--threads"),
        compared=_at_least(arguments.compared, compared, 0, "--compared"),
        urgent=arguments.urgent,
    )
    dtype_of(given.dtype)
    if given.urgent and not may_be_urgent():
        raise OptionError(
            "--urgent",
            "this process may not have real-time priority",
            "Linux, and the capability CAP_SYS_NICE",
            "leave it out",
        )
    if not Path(given.file).exists():
        raise OptionError(
            given.file, "no such file or folder", "a model's folder or file", "check the path"
        )
    return given


def _names(arguments: argparse.Namespace) -> tuple[str, ...]:
    if arguments.against is None:
        # Compiling transformers' model takes longer than all the rest of a quick run.
        return ("llama.cpp",) if arguments.quick else ("llama.cpp", "transformers")
    names = tuple(name.strip() for name in arguments.against.split(","))
    return () if names == ("none",) else tuple(dict.fromkeys(names))


def _batches(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise OptionError("--batch", text, "numbers like 1,4", "correct the option")
    return tuple(dict.fromkeys(int(part) for part in parts))


def _at_least(given: int | None, usual: int, least: int, option: str) -> int:
    value = usual if given is None else given
    if value < least:
        raise OptionError(option, str(value), f"{least} or more", "correct the option")
    return value
