"""What a command of the command line is made of.

Comes in: a name, what it is about, examples and a function. Goes out: a parser of its arguments.
Always holds: making one imports no command; every command has examples and ``--debug``.
"""

from __future__ import annotations

import argparse
import importlib
import re
import textwrap
from typing import NoReturn, TypeAlias

from qcompile.errors import OptionError

Commands: TypeAlias = "argparse._SubParsersAction[Parser]"
FILE = "a GGUF file or a checkpoint folder"


# A word of shell with what it quotes.
_WORD = re.compile(r"""(?:'[^']*'|"[^"]*"|\S)+""")
_WIDEST = 78


class Parser(argparse.ArgumentParser):
    """A parser whose errors are the family's own."""

    def error(self, message: str) -> NoReturn:
        """Refuse the arguments."""
        raise OptionError(
            "the command line", message, f"what {self.prog} --help lists", "correct the arguments"
        )


class Usual(str):
    """The default of an option: the same word, given by a user, is a plain ``str``."""

    __slots__ = ()


class Lazy:
    """A command that is imported when it runs, so that ``--help`` is quick."""

    def __init__(self, module: str, function: str) -> None:
        self.module, self.function = module, function

    def __call__(self, arguments: argparse.Namespace) -> int:
        """Run the command; its exit code."""
        module = importlib.import_module(f"qcompile.cli.{self.module}")
        return int(getattr(module, self.function)(arguments))


def folded(line: str) -> str:
    r"""A line of shell, continued where a terminal of 80 characters ends.

    >>> print(folded("qcompile plan 'a b' " + "--" + 54 * "x" + " --html OUT"))
      qcompile plan 'a b' --xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx \
          --html OUT
    """
    lines = [" "]
    for word in _WORD.findall(line):
        if len(lines[-1]) + 1 + len(word) > _WIDEST:
            lines[-1] += " \\"
            lines.append("     ")
        lines[-1] += f" {word}"
    return "\n".join(lines)


def command(commands: Commands, name: str, about: str, examples: str, run: Lazy) -> Parser:
    """Add a command."""
    lines = "\n".join(map(folded, examples.strip().splitlines()))
    made = commands.add_parser(
        name,
        help=about,
        description=textwrap.fill(f"{about[0].upper()}{about[1:]}.", _WIDEST),
        epilog=f"examples:\n{lines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--debug", action="store_true", help="show tracebacks")
    made.set_defaults(run=run)
    return made
