"""A model as ``qcompile export`` saves it, in a process of its own.

Comes in: JSON lines on stdin, the requests of ``qcompile.bench.model_worker``. Goes out: one JSON
line for each.
Always holds: this process opens an artifact and does nothing else: the export runs in another one,
whose memory and modules are not this one's; no compiler and no transformers is in memory, or there
are no figures; what was exported is removed when the process ends.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import torch

from qcompile.artifact import Artifact, greedy, open_artifact
from qcompile.bench.machine import versions
from qcompile.bench.workers.serve import memory, seconds_since_start, serve

_ABSENT = ("transformers", "torch._dynamo", "torch._inductor")
_SHOWN = 8  # lines of what a failed export said

# Children inherit real-time priority, under which compiling would stop the machine, and the one
# core that OpenMP has bound this process's first thread to. Both must go before torch is imported.
_EXPORT = """
import json, os, sys
given = json.loads(sys.argv[1])
cores = given.pop("cores")
if hasattr(os, "sched_setscheduler"):
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    os.sched_setaffinity(0, cores or range(os.cpu_count()))
from qcompile.bench.exported_worker import export
export(**given)
"""


class ExportError(Exception):
    """The export failed; the text is what it said last."""


class Worker:
    """An artifact that is exported into a folder, then opened."""

    def __init__(self, folder: str | Path) -> None:
        self.folder, self.imported = Path(folder), seconds_since_start()
        self._artifact: Artifact | None = None

    @property
    def artifact(self) -> Artifact:
        """What ``load`` opened."""
        assert self._artifact is not None
        return self._artifact

    def load(
        self,
        file: str,
        device: str,
        dtype: str,
        numerics: str,
        context: int,
        **unused: object,
    ) -> dict[str, Any]:
        """Export the file and open what was made; ``compile_seconds`` are those of the export."""
        given = {"file": file, "device": device, "dtype": dtype, "numerics": numerics}
        out = self.folder / "artifact"
        begin = time.perf_counter()
        _run_export({**given, "out": str(out), "context": context})
        exported = time.perf_counter() - begin
        baseline = memory("VmRSS")
        begin = time.perf_counter()
        self._artifact = open_artifact(out)
        return {
            "seconds": time.perf_counter() - begin,
            "compile_seconds": exported,
            "import_seconds": self.imported,
            "baseline": baseline,
            "weights": self.artifact.header.weight_bytes,
            "versions": versions(),
        }

    def run(self, ids: list[list[int]], tokens: int) -> dict[str, Any]:
        """Read one prompt and continue it greedily.

        Returns:
            ``prefill`` and ``decode``, seconds; decode of all tokens but the first.
        """
        (prompt,) = ids
        seen: list[float] = []

        def choose(logits: torch.Tensor) -> int:
            seen.append(time.perf_counter())
            return greedy(logits)

        given = torch.tensor(prompt)
        begin = time.perf_counter()
        for _ in self.artifact.stream(given, tokens, choose=choose, ends=False):
            pass
        return {"prefill": seen[0] - begin, "decode": seen[-1] - seen[0]}

    def logits(self, ids: list[int], out: str) -> dict[str, Any]:
        """Write float32 ``[T, V]`` logits to a file of numpy's; every id is a step of its own."""
        import numpy as np

        self.artifact.clear()
        rows = [self.artifact.read(torch.tensor([token])).float() for token in ids]
        np.save(out, torch.stack(rows).numpy())
        return {}

    def memory(self) -> dict[str, Any]:
        """Peak of the resident set."""
        present = [name for name in _ABSENT if name in sys.modules]
        if present:
            raise RuntimeError(f"{', '.join(present)} was imported, and its memory would count")
        return {"peak": memory("VmHWM")}


def _run_export(given: dict[str, Any]) -> None:
    """Export in a process of its own, on the cores that this one was given."""
    cores = [int(core) for core in re.findall(r"\d+", os.environ.get("OMP_PLACES", ""))]
    command = (sys.executable, "-c", _EXPORT, json.dumps({**given, "cores": cores}))
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines()[-_SHOWN:]
        raise ExportError("\n".join([f"the export ended with {done.returncode}", *said]))


def export(file: str, out: str, device: str, dtype: str, numerics: str, context: int) -> None:
    """What the other process runs."""
    import qcompile
    from qcompile.cli.generate import dtype_of
    from qcompile.kernel import Numerics
    from qcompile.stepping import ROWS

    asked = cast("Numerics", numerics)  # export refuses any other
    room = max(context, ROWS[1])
    qcompile.export(file, out, device, dtype_of(dtype), numerics=asked, context=room)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="qcompile-exported-") as made:
        serve(Worker(made))
