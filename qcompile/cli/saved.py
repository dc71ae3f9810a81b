"""An artifact as the command line runs it.

Comes in: the folder that ``qcompile export`` made. Goes out: what ``qcompile generate`` needs.
Always holds: options that were decided by the export are refused, not passed over.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qcompile.artifact import Artifact, load_tokenizer, open_artifact
from qcompile.cli.command import Usual
from qcompile.cli.ready import Clock, Report
from qcompile.cli.screen import say
from qcompile.errors import OptionError

# Options of ``generate`` that an export has decided; defaults tell that they were not given.
_DECIDED = (
    *("device", "scheme", "on_unsupported", "numerics"),
    *("emulate", "dtype", "emitter", "verify"),
)


@dataclass(frozen=True)
class Opened:
    """See ``qcompile.cli.ready.Ready``.

    Attributes:
        artifact: the opened folder.
        tokenizer: its tokenizer.
        seconds: what opening took.
    """

    artifact: Artifact
    tokenizer: Any
    seconds: float

    @property
    def limit(self) -> int:
        """Tokens that a text may have."""
        return self.artifact.header.context

    @property
    def facts(self) -> dict[str, object]:
        """What runs it."""
        return {"target": self.artifact.header.target, "emitter": "ahead of time"}

    def compile(self, ids: torch.Tensor) -> float:
        """Nothing: it was compiled when it was exported."""
        return 0.0

    def run(self, ids: torch.Tensor, tokens: int, streamer: Clock | None) -> torch.Tensor:
        """Continue ids ``[1, T]`` greedily; all ids."""
        if streamer is not None:
            streamer.put(ids)
        made: list[int] = []
        for found in self.artifact.stream(ids[0], tokens):
            made.append(found)
            if streamer is not None:
                streamer.put(torch.tensor([found]))
        if streamer is not None:
            streamer.end()
        return torch.cat([ids, torch.tensor([made])], 1)

    def report(self, clock: Clock, ids: torch.Tensor, compiled: float) -> Report:
        """How long a run took that began with ``ids``."""
        return Report(clock, ids.shape[1], self.seconds, 0.0, compiled, 0)

    def text(self, made: torch.Tensor, ids: torch.Tensor) -> str:
        """What was made beyond ``ids``."""
        text: str = self.tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
        return text


def open_saved(path: str | Path, arguments: argparse.Namespace) -> Opened:
    """Open an artifact and say what it is.

    Raises:
        OptionError: an option says what the export has decided.
        ArtifactError, SchemeError: it does not run here, or has no tokenizer.
    """
    for name in _DECIDED:
        given = getattr(arguments, name)
        if given and not isinstance(given, Usual):
            raise OptionError(
                f"--{name.replace('_', '-')}",
                f"{path} is an artifact, for which the export decided it",
                "a checkpoint, or no such option",
                "leave it out, or export the checkpoint again with it",
            )
    begin = time.perf_counter()
    # First: reading it takes more memory for a moment than the weights do later.
    tokenizer = load_tokenizer(Path(path))
    artifact = open_artifact(path)
    seconds = time.perf_counter() - begin
    print((artifact.path / "plan.txt").read_text(encoding="utf-8"), end="", file=sys.stderr)
    say(f"{artifact}, context {artifact.header.context}")
    return Opened(artifact, tokenizer, seconds)
