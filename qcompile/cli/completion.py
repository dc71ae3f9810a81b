"""``qcompile completion``: scripts that complete the command line in a shell.

Comes in: a shell's name. Goes out: its script on stdout.
Always holds: the script is made of the parser that the command uses, so it knows every option; a
shell that runs it starts no Python.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from importlib import import_module

from qcompile import schemes
from qcompile.cli.generate import DTYPES
from qcompile.cli.parser import parser
from qcompile.errors import OptionError
from qcompile.options import POLICIES
from qcompile.target import ARCHITECTURES

_FILES = ("file", "files", "text", "html", "against", "out")


def run_completion(arguments: argparse.Namespace) -> int:
    """Print the script of a shell."""
    try:
        shtab = import_module("shtab")
    except ModuleNotFoundError as error:
        raise OptionError(
            "qcompile completion",
            "the package shtab is not installed",
            "shtab, which writes the scripts",
            'pip install "qcompile[completion]"',
        ) from error
    made = parser()
    for action in _actions(made):
        if action.dest in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.dest in _words():
            # In zsh a bare colon would end the list.
            colon = "\\:" if arguments.shell == "zsh" else ":"
            action.choices = [word.replace(":", colon) for word in _words()[action.dest]]
    print(shtab.complete(made, shell=arguments.shell))
    return 0


def _actions(made: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in made._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)


def _words() -> dict[str, list[str]]:
    """The values of options that have a few; they are checked where they are used, not here."""
    return {
        "device": [f"{kind}:{arch}" for kind, archs in ARCHITECTURES.items() for arch in archs]
        + list(ARCHITECTURES),
        "scheme": ["auto", *schemes.names()],
        "on_unsupported": list(POLICIES),
        "dtype": list(DTYPES),
        "emitter": ["chain", "inductor", "eager"],
    }
