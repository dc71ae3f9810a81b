"""Watching passes at work.

Comes in: a pass and a program. Goes out: the program after the pass, and, when asked, its text.
Always holds: without the environment variables nothing is printed, written or slowed down.

``QCOMPILE_DUMP=dir`` writes ``NN.pass.before.py`` and ``NN.pass.after.py`` and the plan;
``QCOMPILE_LOG=plan|passes|weights`` (or several, with commas) logs to stderr;
``QCOMPILE_SKIP=name,name`` leaves passes out, to find the one that matters;
``QCOMPILE_CHECK=1`` validates the program after every pass.
A value that means nothing here is an error.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qcompile.errors import OptionError, nearest

if TYPE_CHECKING:
    from qcompile.passes import Pass
    from qcompile.program import Program

TOPICS = ("plan", "passes", "weights")
_counter = itertools.count()
_log = logging.getLogger("qcompile")


def log(topic: str, message: str) -> None:
    """Log a message of a topic that ``QCOMPILE_LOG`` asks for."""
    if topic not in _words("QCOMPILE_LOG", TOPICS):
        return
    if not _log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("qcompile %(message)s"))
        _log.addHandler(handler)
        _log.setLevel(logging.INFO)
    _log.info("%s: %s", topic, message)


def _words(variable: str, allowed: Sequence[str]) -> list[str]:
    """The words of a variable, separated by commas."""
    words = [word.strip() for word in os.environ.get(variable, "").split(",") if word.strip()]
    for word in words:
        if word not in allowed:
            raise OptionError(
                variable,
                f"unknown value {word!r}",
                f"some of {', '.join(allowed)}, with commas",
                f"correct the variable{nearest(word, allowed)}",
            )
    return words


def run_pass(rewrite: Pass, program: Program) -> None:
    """Run one pass with the dumps, logs, checks and switches of the environment."""
    from qcompile.passes import NAMES, installed

    check = _words("QCOMPILE_CHECK", ("0", "1"))
    known = list(dict.fromkeys((*NAMES, *(p.name for p in installed()), rewrite.name)))
    if rewrite.name in _words("QCOMPILE_SKIP", known):
        log("passes", f"{rewrite.name} skipped")
        return
    number = next(_counter)
    dump(f"{number:02d}.{rewrite.name}.before.py", program)
    begin = time.perf_counter()
    changed = rewrite.run(program)
    seconds = time.perf_counter() - begin
    dump(f"{number:02d}.{rewrite.name}.after.py", program)
    log("passes", f"{rewrite.name} changed {changed} nodes in {seconds * 1e3:.1f} ms")
    if "1" in check:
        program.check(rewrite.name)


def dump(name: str, content: object) -> None:
    """Write the text of something into the dump folder, if there is one."""
    folder = os.environ.get("QCOMPILE_DUMP")
    if not folder:
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, name).write_text(str(content), encoding="utf-8")
    except OSError as error:
        raise OptionError(
            f"QCOMPILE_DUMP={folder}",
            f"{name} cannot be written: {error.strerror}",
            "a folder to write to",
            "name another folder",
        ) from None
