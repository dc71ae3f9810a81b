"""The processes of the contenders, and what is asked of them.

Comes in: contenders. Goes out: answers to requests.
Always holds: all have the same number of threads, bound to one core each; a process that dies or
refuses is told with the contender's name; no process outlives its context.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from qcompile.bench.peers import Contender
from qcompile.errors import QCompileError

_SHOWN = 12  # lines of a dead process's stderr


class BenchError(QCompileError):
    """A contender could not be measured."""


@dataclass
class Process:
    """A contender's running process."""

    contender: Contender
    process: subprocess.Popen[str]
    errors: IO[str]

    def ask(self, do: str, urgent: bool = False, **given: Any) -> dict[str, Any]:
        """One request and its answer.

        Args:
            do: a method of the worker.
            urgent: run it before everything else on the machine.
            given: the method's arguments.

        Raises:
            BenchError: the process died or refused.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with _first(self.process.pid) if urgent else contextlib.nullcontext():
            line = ""
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.write(json.dumps({"do": do, **given}) + "\n")
                self.process.stdin.flush()
                line = self.process.stdout.readline()
        if not line:
            raise self._failure(do, self._end(), self._said())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise self._failure(do, str(answer["error"]), ())
        return answer

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.errors.close()

    def _failure(self, do: str, found: str, reasons: tuple[str, ...]) -> BenchError:
        without = "" if self.contender.own else "leave it out of --against, or "
        return BenchError(
            f"{self.contender.name}, {do}",
            found,
            "an answer from its process",
            f"{without}mend what it names",
            reasons=reasons,
        )

    def _end(self) -> str:
        code = self.process.wait()
        if code >= 0:
            return f"its process ended with exit code {code}"
        return f"its process was ended by {signal.Signals(-code).name}"

    def _said(self) -> tuple[str, ...]:
        self.errors.seek(0)
        return tuple(self.errors.read().splitlines()[-_SHOWN:])


@contextlib.contextmanager
def started(
    contender: Contender, threads: int, settings: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Process]:
    """A contender's process, for the length of the context, with settings in its environment."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        process = subprocess.Popen(
            contender.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **pinned(threads), **settings},
        )
        made = Process(contender, process, errors)
        try:
            yield made
        finally:
            made.close()


def pinned(threads: int) -> dict[str, str]:
    """Settings that bind OpenMP's threads to one core each: it reads them at its start only."""
    allowed = getattr(os, "sched_getaffinity", None)  # Linux alone has it
    cores = sorted(allowed(0))[:threads] if allowed else []
    places = {"OMP_PLACES": ",".join(f"{{{core}}}" for core in cores)} if cores else {}
    return {"OMP_NUM_THREADS": str(threads), "OMP_PROC_BIND": "close", **places}


def may_be_urgent() -> bool:
    """Whether this process may have real-time priority, and give it."""
    try:
        with _first(os.getpid()):
            return True
    except (AttributeError, PermissionError):  # not Linux, or without the right to it
        return False


@contextlib.contextmanager
def _first(pid: int) -> Iterator[None]:
    """Real-time priority for all threads of a process meanwhile."""
    usual = os.sched_getscheduler(pid), os.sched_getparam(pid)
    _schedule(pid, os.SCHED_FIFO, os.sched_param(50))
    try:
        yield
    finally:
        _schedule(pid, *usual)


def _schedule(pid: int, policy: int, parameters: os.sched_param) -> None:
    for task in Path(f"/proc/{pid}/task").glob("*"):
        # A thread may end meanwhile.
        with contextlib.suppress(ProcessLookupError):
            os.sched_setscheduler(int(task.name), policy, parameters)
