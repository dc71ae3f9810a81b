"""The terminal that a command prints on.

Comes in: the environment and what stdout is. Goes out: a width, a painter, lines on stderr.
Always holds: no escape code leaves unless stdout is a terminal and neither ``NO_COLOR`` nor
``TERM=dumb`` is set; lines are fitted to a width only where there is one.
"""

from __future__ import annotations

import os
import shutil
import sys
from typing import TextIO

from qcompile.plan_table import Paint, Style, no_paint
from qcompile.visible import visible

_CODES: dict[Style, str] = {"title": "1", "dim": "2", "good": "32", "bad": "31", "warn": "33"}


def width(stream: TextIO | None = None) -> int | None:
    """Characters in a line of the terminal; None where the stream, stdout, is none.

    ``COLUMNS`` sets it for any stream.
    """
    if os.environ.get("COLUMNS", "").isdecimal():
        return int(os.environ["COLUMNS"])
    shown = stream or sys.stdout
    if not shown.isatty():
        return None
    try:
        return os.get_terminal_size(shown.fileno()).columns
    except (OSError, ValueError):  # a stream that pretends to be a terminal
        return shutil.get_terminal_size().columns


def painter() -> Paint:
    """Colours where the terminal shows them."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return no_paint
    return _coloured


def say(text: str) -> None:
    """Print to stderr, so that stdout holds the result alone."""
    print(visible(text), file=sys.stderr, flush=True)


def _coloured(style: Style, text: str) -> str:
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m"
