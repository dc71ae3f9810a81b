"""The terminal that a command prints on.

Comes in: the environment and what stdout is. Goes out: a width and a painter.
Always holds: no escape code leaves unless stdout is a terminal and neither ``NO_COLOR`` nor
``TERM=dumb`` is set; lines are fitted to a width only where there is one.
"""

from __future__ import annotations

import os
import shutil
import sys

from qcompile.plan_table import Paint, Style, no_paint

_CODES: dict[Style, str] = {"title": "1", "dim": "2", "good": "32", "bad": "31", "warn": "33"}


def width() -> int | None:
    """Characters in a line of the terminal; None where stdout is none and COLUMNS is not set."""
    if not sys.stdout.isatty() and not os.environ.get("COLUMNS", "").isdecimal():
        return None
    return shutil.get_terminal_size().columns


def painter() -> Paint:
    """Colours where the terminal shows them."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return no_paint
    return _coloured


def _coloured(style: Style, text: str) -> str:
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m"
