"""auto-round-lib: the kernels that AutoRound and Intel's tools run quantized weights with.

Comes in: requests. Goes out: answers of a linear layer's worker.
Always holds: symmetric codes with float32 scales, float32 activations, and the kind of products
that the package's own layers ask for (``int8``).
"""

from __future__ import annotations

import torch

from .rounds import Built, LinearWorker
from .serve import Refused, serve
from .torch_weights import affine, built, values_of

_FORMATS = {"4-bit g32": (4, 32), "4-bit g128": (4, 128), "q8_0": (8, 32), "8-bit g128": (8, 128)}
_PRODUCTS = "int8"


def build(format: str, n: int, k: int, rotated: int) -> Built:
    """Pack codes and scales."""
    import auto_round_kernel as kernels

    if format not in _FORMATS:
        raise Refused(f"no kernel for {format}")
    bits, group = _FORMATS[format]
    codes, scale = affine(bits, group, n, k)
    signed = (codes.int() - (1 << (bits - 1))).to(torch.int8).T.contiguous()
    kind = (_PRODUCTS, f"int{bits}", "fp32", False)
    none, bias = torch.zeros(0, dtype=torch.int8), torch.zeros(n)
    steps = scale.T.contiguous()
    packed = kernels.repack_quantized_weight(signed, steps, none, group, *kind)

    def product(x: torch.Tensor, blob: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = kernels.woqgemm(x, blob, bias, n, k, group, *kind)
        return result

    values = values_of(codes, scale, bits)
    note = "woqgemm, float32 activations"
    return built(product, packed, values, torch.float32, rotated, note)


def main() -> None:
    """Serve."""
    from importlib.metadata import version

    import auto_round_kernel  # noqa: F401

    torch.set_grad_enabled(False)
    found = {"torch": torch.__version__, "auto-round-lib": version("auto-round-lib")}
    serve(LinearWorker({"linear": build}, found))
