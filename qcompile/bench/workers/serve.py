"""How a worker answers, and what it tells of its memory.

Comes in: a worker, whose methods are the requests. Goes out: one JSON line for each request,
``{"error": ...}`` on failure.
Always holds: nothing but answers reaches the pipe, whatever libraries print.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, TextIO


class Refused(Exception):
    """A worker cannot do what it was asked; the text says why."""


_answers: list[TextIO] = []


def keep_for_answers() -> TextIO:
    """Send to stderr whatever is printed from now on; the pipe that stdout was."""
    if not _answers:
        _answers.append(os.fdopen(os.dup(1), "w", encoding="utf-8"))
        os.dup2(2, 1)  # what a library prints must not look like an answer
    return _answers[0]


def serve(worker: Any) -> None:
    """Answer requests until the pipe closes."""
    answers = keep_for_answers()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(worker, request.pop("do"))(**request)
        except Refused as error:
            answer = {"refused": str(error)}
        except Exception as error:  # told to the other side, which names the contender
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def memory(name: str) -> int:
    """A figure of this process's memory as Linux tells it, in bytes; 0 where it does not."""
    try:
        with open("/proc/self/status", encoding="utf-8") as lines:
            return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))
    except (OSError, StopIteration):
        return 0


def seconds_since_start() -> float:
    """How long this process has lived, as Linux tells it; 0 where it does not."""
    try:
        with open("/proc/self/stat", encoding="utf-8") as line:
            started = int(line.read().rpartition(")")[2].split()[19])
        with open("/proc/uptime", encoding="utf-8") as line:
            return float(line.read().split()[0]) - started / os.sysconf("SC_CLK_TCK")
    except OSError:
        return 0.0
