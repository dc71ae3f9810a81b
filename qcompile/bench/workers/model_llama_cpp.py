"""A model in llama.cpp.

Comes in: the requests of ``qcompile.bench.model_worker``, JSON lines on stdin. Goes out: one answer
each. Always holds: tokens are chosen greedily from the logits of the last position, outside of any
sampler.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

from .serve import memory, seconds_since_start, serve


class Worker:
    """A model in llama.cpp."""

    def __init__(self) -> None:
        import llama_cpp
        import numpy as np

        self.library: Any = llama_cpp
        self.np: Any = np
        self.imported = seconds_since_start()
        self.settings: dict[str, Any] = {}
        self.model: Any = None

    def load(self, file: str, context: int, threads: int, **unused: object) -> dict[str, Any]:
        """Load the file."""
        baseline = memory("VmRSS")
        self.settings = {
            "model_path": file,
            "n_batch": 512,
            "n_ubatch": 512,
            "n_threads": threads,
            "n_threads_batch": threads,
            "verbose": False,
        }
        begin = time.perf_counter()
        self.model = self.library.Llama(n_ctx=context, **self.settings)
        return {
            "seconds": time.perf_counter() - begin,
            "import_seconds": self.imported,
            "baseline": baseline,
            "weights": int(self.library.llama_model_size(self.model.model)),
            "versions": {"llama-cpp-python": self.library.__version__},
        }

    def run(self, ids: list[list[int]], tokens: int) -> dict[str, Any]:
        """Read one prompt and continue it greedily; seconds of both."""
        self.model.reset()
        begin = time.perf_counter()
        self.model.eval(ids[0])
        token = self._best()
        first = time.perf_counter()
        for _ in range(tokens - 1):
            self.model.eval([token])
            token = self._best()
        return {"prefill": first - begin, "decode": time.perf_counter() - first}

    def logits(self, ids: list[int], out: str) -> dict[str, Any]:
        """Write float32 ``[T, V]`` logits to a file of numpy's."""
        self.model.close()
        self.model = self.library.Llama(n_ctx=len(ids) + 8, logits_all=True, **self.settings)
        self.model.eval(ids)
        self.np.save(out, self.np.asarray(self.model.scores[: len(ids)], dtype=self.np.float32))
        return {}

    def memory(self) -> dict[str, Any]:
        """Peak of the resident set."""
        return {"peak": memory("VmHWM")}

    def _best(self) -> int:
        logits = self.library.llama_get_logits(self.model.ctx)
        size = self.model.n_vocab()
        values = self.np.ctypeslib.as_array(
            ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)), shape=(size,)
        )
        return int(values.argmax())


def main() -> None:
    """Serve."""
    serve(Worker())
