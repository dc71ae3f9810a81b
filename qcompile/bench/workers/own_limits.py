"""What this machine's memory and arithmetic allow, measured with torch.

Comes in: requests. Goes out: seconds of reading memory, and rates of large products.
Always holds: the memory that is read lies in large pages, where the system has them; a rate is the
fastest of the calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from qcompile.memory import in_large_pages

from .rounds import timed_calls
from .serve import serve

_SIDE = 2048


class Worker:
    """Answers ``facts``, ``read`` and ``peaks``."""

    def __init__(self) -> None:
        self.data: torch.Tensor | None = None

    def facts(self) -> dict[str, Any]:
        """Versions of the packages."""
        return {"versions": {"torch": torch.__version__}}

    def read(self, nbytes: int, seconds: float) -> dict[str, Any]:
        """Read so many bytes from memory again and again.

        Returns:
            bytes of a call, and its seconds.
        """
        if self.data is None or self.data.nbytes != nbytes // 8 * 8:
            # As packed weights are: with small pages, memory reads a tenth slower.
            self.data = in_large_pages(torch.empty(nbytes // 8, dtype=torch.int64)).fill_(1)
            self.data.sum()
        return {"bytes": self.data.nbytes, "seconds": timed_calls(self.data.sum, seconds)}

    def peaks(self, seconds: float) -> dict[str, Any]:
        """Operations a second of square products, by dtype."""
        one = torch.randn(_SIDE, _SIDE)
        thin, whole = one.bfloat16(), (one * 20).to(torch.int8)
        calls: dict[str, Callable[[], object]] = {
            "float32": lambda: one @ one,
            "bfloat16": lambda: thin @ thin,
            "int8": lambda: torch._int_mm(whole, whole),
        }
        found = {}
        for name, call in calls.items():
            call()
            found[name] = 2 * _SIDE**3 / min(timed_calls(call, seconds))
        return {"rates": found}


def main() -> None:
    """Serve."""
    torch.set_grad_enabled(False)
    serve(Worker())
