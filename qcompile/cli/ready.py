"""A model that is ready to continue texts, and how long a run of it took.

Comes in: a run's times. Goes out: figures as text and as JSON.
Always holds: a checkpoint's model and an artifact answer to the same calls; times are of one run.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch


class Ready(Protocol):
    """A model with its tokenizer."""

    @property
    def tokenizer(self) -> Any:
        """What turns texts into ids, by transformers."""

    @property
    def limit(self) -> int | None:
        """Tokens that a text may have, where the model says it."""

    @property
    def facts(self) -> dict[str, object]:
        """What runs it: ``target`` and ``emitter``."""

    def compile(self, ids: torch.Tensor) -> float:
        """Trace and compile what a run needs; the seconds it took, without packing."""

    def run(self, ids: torch.Tensor, tokens: int, streamer: Clock | None) -> torch.Tensor:
        """Continue ids ``[1, T]`` greedily; all ids ``[1, T + n]``."""

    def report(self, clock: Clock, ids: torch.Tensor, compiled: float) -> Report:
        """How long a run took that began with ``ids``."""

    def text(self, made: torch.Tensor, ids: torch.Tensor) -> str:
        """What was made beyond ``ids``."""


@dataclass
class Clock:
    """A streamer for ``generate`` that notes when each token came, and prints text if it can."""

    text: Any
    times: list[float] = field(default_factory=list)

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt first, then token after token."""
        self.times.append(time.perf_counter())
        if self.text is not None:
            self.text.put(value)

    def end(self) -> None:
        """Flush the text."""
        if self.text is not None:
            self.text.end()


@dataclass(frozen=True)
class Report:
    """How long each part of a run took.

    Attributes:
        clock: when each token came.
        prompt: tokens of the prompt.
        loaded, packed, compiled: seconds.
        graphs: graphs that were compiled.
    """

    clock: Clock
    prompt: int
    loaded: float
    packed: float
    compiled: float
    graphs: int

    @property
    def facts(self) -> dict[str, object]:
        """What was measured, as values that JSON has."""
        # times: start, prompt handed over, first token, second token, ...
        begin, first, last = self.clock.times[0], self.clock.times[2], self.clock.times[-1]
        more = len(self.clock.times) - 3
        return {
            "load_seconds": self.loaded,
            "pack_seconds": self.packed,
            "compile_seconds": self.compiled,
            "graphs": self.graphs,
            "prompt_tokens": self.prompt,
            "tokens": more + 1,
            "prefill_tokens_a_second": self.prompt / (first - begin),
            "decode_tokens_a_second": more / (last - first) if more else None,
            "peak_bytes": peak_memory(),
        }

    @property
    def text(self) -> str:
        """The same in four lines."""
        facts: dict[str, Any] = self.facts
        rate = facts["decode_tokens_a_second"]
        decode = "one token only" if rate is None else f"{rate:.1f} tokens/s"
        return "\n".join(
            [
                f"load     {self.loaded:.2f} s, packing {self.packed:.2f} s,"
                f" compiling {self.compiled:.1f} s ({self.graphs} graphs)",
                f"prefill  {facts['prefill_tokens_a_second']:.1f} tokens/s ({self.prompt} tokens)",
                f"decode   {decode} ({facts['tokens']} tokens)",
                f"memory   {facts['peak_bytes'] / 2**20:.0f} MiB at the peak",
            ]
        )


def peak_memory() -> int:
    """Largest resident set of this process so far, in bytes."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
