"""The command line.

Comes in: arguments. Goes out: text on stdout and an exit code.
Always holds: an error is one message on stderr that starts with the name of its class, and exit
code 2; a traceback appears only with ``--debug``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from qcompile.errors import OptionError, QCompileError, SchemeError
from qcompile.visible import visible

_POLICIES = "for sites without a kernel: error, dequantize or requantize"


class Parser(argparse.ArgumentParser):
    """A parser whose errors are the family's own."""

    def error(self, message: str) -> NoReturn:
        """Refuse the arguments."""
        raise OptionError(
            "the command line", message, f"what {self.prog} --help lists", "correct the arguments"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    given = sys.argv[1:] if argv is None else argv
    try:
        arguments = _parser().parse_args(given)
        code = int(arguments.run(arguments))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Python flushes once more at exit, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (QCompileError, OSError) as error:
        if "--debug" in given:
            raise
        known = error if isinstance(error, QCompileError) else _refused_by_system(error)
        print(visible(f"{type(known).__name__}: {known}"), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _refused_by_system(error: OSError) -> QCompileError:
    return SchemeError(
        str(error.filename or "the system"),
        error.strerror or str(error),
        "a file that can be read",
        "check the path and its permissions",
    )


def _parser() -> Parser:
    parser = Parser(prog="qcompile", description="Compile and run quantized models.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _demo(commands)
    _generate(commands)
    _plan(commands)
    _inspect(commands)
    return parser


def _demo(commands: argparse._SubParsersAction[Parser]) -> None:
    command = commands.add_parser(
        "demo", help="run Gemma 3 270M (Q4_K_M) from the packages of the demo extra"
    )
    command.add_argument("--prompt", default=None, help="text to continue")
    _common_generation(command)
    command.set_defaults(run=_lazy("demo", "run_demo"))


def _generate(commands: argparse._SubParsersAction[Parser]) -> None:
    command = commands.add_parser("generate", help="continue a prompt")
    command.add_argument("file", help="a GGUF file or a checkpoint folder")
    command.add_argument("--prompt", required=True, help="text to continue")
    _common_generation(command)
    command.set_defaults(run=_lazy("generate", "run_generate"))


def _common_generation(command: argparse.ArgumentParser) -> None:
    command.add_argument("--device", default="cpu", help="cpu, cuda:sm90, npu:910b, ...")
    command.add_argument("--scheme", default="auto", help="the checkpoint's scheme")
    command.add_argument("--dtype", default=None, help="float32, bfloat16 or float16")
    command.add_argument(
        "--emulate", action="store_true", help="run the device's operators on this CPU"
    )
    command.add_argument("--tokens", type=int, default=64, help="tokens to generate at most")
    command.add_argument("--emitter", default=None, help="inductor or eager")
    command.add_argument("--verify", action="store_true", help="check every site first")
    command.add_argument("--on-unsupported", default="error", help=_POLICIES)
    command.add_argument("--debug", action="store_true", help="show tracebacks")


def _plan(commands: argparse._SubParsersAction[Parser]) -> None:
    command = commands.add_parser("plan", help="which kernel would run each site, and why")
    command.add_argument("file", help="a GGUF file or a checkpoint folder")
    command.add_argument("--device", default="cpu", help="cpu, cuda:sm90, npu:910b, ...")
    command.add_argument("--scheme", default="auto", help="the checkpoint's scheme")
    command.add_argument("--on-unsupported", default="error", help=_POLICIES)
    command.add_argument("--json", action="store_true", help="print JSON")
    command.add_argument("--explain", metavar="SITE", help="every kernel's verdict on one site")
    command.add_argument("--debug", action="store_true", help="show tracebacks")
    command.set_defaults(run=_lazy("show", "run_plan"))


def _inspect(commands: argparse._SubParsersAction[Parser]) -> None:
    command = commands.add_parser("inspect", help="what a checkpoint's headers say")
    command.add_argument("file", help="a GGUF file or a checkpoint folder")
    command.add_argument("--scheme", default="auto", help="the checkpoint's scheme")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.add_argument("--debug", action="store_true", help="show tracebacks")
    command.set_defaults(run=_lazy("show", "run_inspect"))


class _lazy:
    """A command that is imported when it runs, so that ``--help`` is quick."""

    def __init__(self, module: str, function: str) -> None:
        self.module, self.function = module, function

    def __call__(self, arguments: argparse.Namespace) -> int:
        import importlib

        module = importlib.import_module(f"qcompile.cli.{self.module}")
        return int(getattr(module, self.function)(arguments))
