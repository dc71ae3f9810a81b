"""bitsandbytes: its 4-bit tables.

Comes in: requests. Goes out: answers of a linear layer's worker.
Always holds: blocks have 64 values, and activations are bfloat16.
"""

from __future__ import annotations

import copy

import torch

from .rounds import Built, LinearWorker
from .serve import Refused, serve
from .torch_weights import CHECKED, built, floats


def build(format: str, n: int, k: int, rotated: int) -> Built:
    """Quantize a float weight."""
    import bitsandbytes
    from bitsandbytes import functional

    if format != "nf4 g64":
        raise Refused(f"no kernel for {format}")
    weight = floats(n, k).bfloat16()
    packed, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    values = functional.dequantize_4bit(packed, state)[:CHECKED].float()

    def product(x: torch.Tensor, parts: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        own = copy.copy(state)
        own.absmax = parts[1]
        result: torch.Tensor = bitsandbytes.matmul_4bit(x, parts[0].t(), own)
        return result

    note = "matmul_4bit, bfloat16 activations"
    return built(product, (packed, state.absmax), values, torch.bfloat16, rotated, note)


def main() -> None:
    """Serve."""
    from importlib.metadata import version

    import bitsandbytes  # noqa: F401

    torch.set_grad_enabled(False)
    found = {"torch": torch.__version__, "bitsandbytes": version("bitsandbytes")}
    serve(LinearWorker({"linear": build}, found))
