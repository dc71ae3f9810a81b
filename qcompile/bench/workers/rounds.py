"""A worker of linears and embeddings: weights by the dozen, timed a round at a time.

Comes in: a function that makes a weight of a format, and requests. Goes out: seconds of each call.
Always holds: calls go round enough copies of a weight to fill more memory than was asked for, and
go on where the last round stopped; the first call of each number of rows is not timed; a call that
would take longer than the limit is refused before it is made, judged by fewer rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .serve import Refused

Call = Callable[[int, int], object]


@dataclass
class Built:
    """Copies of one weight.

    Attributes:
        call: the product of copy number *i* with activations of so many rows.
        copies: how many there are.
        nbytes: of one copy.
        error: relative L2 error of the product against the weight's own decoded values.
        note: how the weight is stored and what is done with activations.
    """

    call: Call
    copies: int
    nbytes: int
    error: float
    note: str


Build = Callable[[str, int, int, int], Built]


def copies_for(nbytes: int, rotated: int) -> int:
    """How many weights of so many bytes fill more than ``rotated`` bytes; two at least."""
    return max(2, rotated // max(nbytes, 1) + 1)


def timed_calls(call: Callable[[], object], seconds: float) -> list[float]:
    """Seconds of each call: at least one, then as many as should fit into ``seconds``."""
    times: list[float] = []
    began = time.perf_counter()
    while not times or time.perf_counter() - began + times[-1] < seconds:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


class LinearWorker:
    """Answers ``prepare``, ``time`` and ``drop``."""

    def __init__(self, builds: dict[str, Build], versions: dict[str, str]) -> None:
        self.builds, self.versions = builds, versions
        self.built: Built | None = None
        self.turn, self.warm = 0, {0: 0.0}

    def facts(self) -> dict[str, Any]:
        """Versions of the packages."""
        return {"versions": self.versions}

    def prepare(self, kind: str, format: str, n: int, k: int, rotated: int) -> dict[str, Any]:
        """Make the weights of a format, ``[n, k]``, for a kind of site."""
        self.drop()
        if kind not in self.builds:
            raise Refused(f"no kernel for {kind}s")
        built = self.builds[kind](format, n, k, rotated)
        self.built = built
        return {
            "copies": built.copies,
            "bytes": built.nbytes,
            "relative_l2": built.error,
            "note": built.note,
        }

    def time(self, rows: int, seconds: float, limit: float) -> dict[str, Any]:
        """One round: at least one call, then as many as fit.

        Args:
            rows: of the activations.
            seconds: when to stop.
            limit: of one call.
        """
        built = self.built
        assert built is not None
        if rows not in self.warm:
            self._warm(built, rows, limit)

        def once() -> None:
            built.call(self.turn % built.copies, rows)
            self.turn += 1

        return {"seconds": timed_calls(once, seconds)}

    def drop(self) -> dict[str, Any]:
        """Forget the weights."""
        self.built, self.warm, self.turn = None, {0: 0.0}, 0
        return {}

    def _warm(self, built: Built, rows: int, limit: float) -> None:
        fewer = max(count for count in self.warm if count < rows)
        # Kernels gain from rows, though hardly more than this factor once there are several.
        guess = self.warm[fewer] * rows / max(fewer, 1) / 4
        if guess > limit:
            raise Refused(f"{fewer} rows take {self.warm[fewer]:.2g} s, {rows} would take too long")
        start = time.perf_counter()
        built.call(0, rows)
        self.warm[rows] = time.perf_counter() - start
        if self.warm[rows] > limit:
            raise Refused(f"{rows} rows take {self.warm[rows]:.2g} s, longer than {limit:g}")
