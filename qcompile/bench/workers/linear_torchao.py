"""torchao: its weight-only kernels for a CPU, as its own tensor classes call them.

Comes in: requests. Goes out: answers of a linear layer's worker.
Always holds: 4 bits are the class ``Int4OpaqueTensor`` of its prototypes (the stable formats want a
GPU), 8 bits quantize activations on the fly or not, whichever the format names.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from .rounds import Built, LinearWorker
from .serve import Refused, serve
from .torch_weights import CHECKED, built, floats


def build(format: str, n: int, k: int, rotated: int) -> Built:
    """Quantize a float weight as torchao does."""
    config, note = _config(format)
    from torchao.quantization import quantize_

    layer = nn.Linear(k, n, bias=False, dtype=torch.bfloat16)
    layer.weight = nn.Parameter(floats(n, k).bfloat16(), requires_grad=False)
    quantize_(layer, config)
    weight: Any = layer.weight
    values = _values(weight, k)
    return built(nn.functional.linear, weight, values, torch.bfloat16, rotated, note)


def _config(format: str) -> tuple[Any, str]:
    from torchao.quantization import Float8WeightOnlyConfig, Int8DynamicActivationInt8WeightConfig

    if format in ("4-bit g32", "4-bit g128"):
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

        group = int(format.partition("g")[2])
        return PrototypeInt4WeightOnlyConfig(group_size=group), "Int4OpaqueTensor"
    if format == "8-bit row":
        return Int8DynamicActivationInt8WeightConfig(), "Int8Tensor, activations rounded to 8 bits"
    if format == "fp8 row":
        return Float8WeightOnlyConfig(), "Float8Tensor, weights only"
    raise Refused(f"no kernel for {format}")


def _values(weight: Any, k: int) -> torch.Tensor:
    """What the weight stands for: its product with the identity, where it cannot tell."""
    with contextlib.suppress(NotImplementedError):
        values: torch.Tensor = weight.dequantize()[:CHECKED].float()
        return values
    parts = [
        nn.functional.linear(rows, weight) for rows in torch.eye(k, dtype=torch.bfloat16).split(512)
    ]
    return torch.cat(parts).T[:CHECKED].float()


def main() -> None:
    """Serve."""
    from importlib.metadata import version

    torch.set_grad_enabled(False)
    serve(
        LinearWorker({"linear": build}, {"torch": torch.__version__, "torchao": version("torchao")})
    )
