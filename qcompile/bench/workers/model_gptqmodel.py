"""A GPTQ folder in gptqmodel, with the kernel that it chooses for a CPU.

Comes in: requests of a model's worker. Goes out: answers.
Always holds: activations are bfloat16; the model is not compiled, as gptqmodel runs its models.
"""

from __future__ import annotations

import time
from typing import Any

from .hf_model import HfModel
from .serve import memory, seconds_since_start, serve


class Worker(HfModel):
    """The model."""

    def __init__(self) -> None:
        super().__init__()
        import gptqmodel

        self.package: Any = gptqmodel
        self.imported = seconds_since_start()

    def load(self, file: str, threads: int, **unused: object) -> dict[str, Any]:
        """Load the folder."""
        from importlib.metadata import version

        import torch

        torch.set_num_threads(threads)
        baseline = memory("VmRSS")
        begin = time.perf_counter()
        loaded = self.package.GPTQModel.load(file, device="cpu", dtype=torch.bfloat16)
        seconds = time.perf_counter() - begin
        model = loaded.model
        parts = (*model.parameters(), *model.buffers())
        return {
            "seconds": seconds,
            "import_seconds": self.imported,
            "baseline": baseline,
            "weights": sum(part.nbytes for part in parts),
            "versions": {"gptqmodel": version("gptqmodel")},
            **self.hold(model, loaded.tokenizer),
        }


def main() -> None:
    """Serve."""
    serve(Worker())
