"""optimum-quanto: its own tensor classes.

Comes in: requests. Goes out: answers of a linear layer's worker.
Always holds: weights are quantized by its own defaults, activations are bfloat16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .rounds import Built, LinearWorker
from .serve import Refused, serve
from .torch_weights import CHECKED, built, floats

_FORMATS = {"4-bit g128": "qint4", "8-bit row": "qint8", "fp8 row": "qfloat8"}


def build(format: str, n: int, k: int, rotated: int) -> Built:
    """Quantize a float weight."""
    from optimum import quanto

    if format not in _FORMATS:
        raise Refused(f"no kernel for {format}")
    layers: Any = nn.Sequential(nn.Linear(k, n, bias=False, dtype=torch.bfloat16))
    layers[0].weight.data.copy_(floats(n, k))
    quanto.quantize(layers, weights=getattr(quanto, _FORMATS[format]))
    quanto.freeze(layers)
    weight: Any = layers[0].weight.detach()
    values = weight.dequantize()[:CHECKED].float()
    note = type(weight).__name__
    return built(nn.functional.linear, weight, values, torch.bfloat16, rotated, note)


def main() -> None:
    """Serve."""
    from importlib.metadata import version

    from optimum import quanto  # noqa: F401

    torch.set_grad_enabled(False)
    found = {"torch": torch.__version__, "optimum-quanto": version("optimum-quanto")}
    serve(LinearWorker({"linear": build}, found))
