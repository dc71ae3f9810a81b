"""torch's own products: ``F.linear`` on bfloat16 weights, and the ATen kernels for codes.

Comes in: ``bf16``, ``aten`` or ``dynamic``. Goes out: answers of a linear layer's worker.
Always holds: *bf16* takes every format and is what tables compare with; *aten* is
``_weight_int4pack_mm_for_cpu`` and ``_weight_int8pack_mm``, *dynamic* is
``_dyn_quant_matmul_4bit``, which rounds activations to 8 bits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from .rounds import Build, Built, LinearWorker
from .serve import Refused, serve
from .torch_weights import CHECKED, affine, built, floats, values_of

_BF16 = torch.bfloat16
Product = Callable[..., torch.Tensor]
_GROUPS = {"4-bit g32": 32, "4-bit g128": 128}


def bf16(format: str, n: int, k: int, rotated: int) -> Built:
    """``F.linear``."""
    weight = floats(n, k).to(_BF16)
    return built(
        functional.linear, weight, weight[:CHECKED].float(), _BF16, rotated, "bfloat16 weights"
    )


def embed(format: str, n: int, k: int, rotated: int) -> Built:
    """``F.embedding``: every copy is a set of ids."""
    weight, size = floats(n, k).to(_BF16), n * k * 2
    draw = torch.Generator().manual_seed(n)
    made: dict[tuple[int, int], torch.Tensor] = {}

    def call(copy: int, rows: int) -> torch.Tensor:
        if (copy, rows) not in made:
            made[copy, rows] = torch.randint(0, n, (rows,), generator=draw)
        return functional.embedding(made[copy, rows], weight)

    return Built(call, 64, size, 0.0, "bfloat16 weights")


def aten(format: str, n: int, k: int, rotated: int) -> Built:
    """Codes of 4 bits by groups, or of 8 bits by rows."""
    if format == "8-bit row":
        codes, scale = affine(8, k, n, k)
        signed = (codes.int() - 128).to(torch.int8)
        parts = (signed, scale[:, 0].to(_BF16))
        note = "_weight_int8pack_mm, bfloat16 activations"
        values = values_of(codes, scale, 8)
        return built(
            lambda x, p: torch._weight_int8pack_mm(x, *p), parts, values, _BF16, rotated, note
        )
    group = _group(format)
    codes, scale = affine(4, group, n, k)
    packed = torch._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
    steps = scale.to(_BF16)
    pairs = torch.stack([steps, torch.zeros_like(steps)], -1).transpose(0, 1).contiguous()

    def product(x: torch.Tensor, parts: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        op: Product = torch.ops.aten._weight_int4pack_mm_for_cpu
        return op(x, parts[0], group, parts[1])

    note = "_weight_int4pack_mm_for_cpu, bfloat16 activations"
    return built(product, (packed, pairs), values_of(codes, scale, 4), _BF16, rotated, note)


def dynamic(format: str, n: int, k: int, rotated: int) -> Built:
    """Activations rounded to 8 bits by rows."""
    group = _group(format)
    codes, scale = affine(4, group, n, k)
    pairs = codes[:, 1::2] << 4 | codes[:, ::2]
    packed = torch.ops.aten._dyn_quant_pack_4bit_weight(pairs, scale.to(_BF16), None, group, k, n)

    def product(x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        op: Product = torch.ops.aten._dyn_quant_matmul_4bit
        return op(x, part, group, k, n)

    note = "_dyn_quant_matmul_4bit, activations rounded to 8 bits"
    values = values_of(codes, scale, 4)
    return built(product, packed, values, torch.float32, rotated, note)


def _group(format: str) -> int:
    if format not in _GROUPS:
        raise Refused(f"no kernel for {format}")
    return _GROUPS[format]


def main(kind: str) -> None:
    """Serve one of the three."""
    torch.set_grad_enabled(False)
    builds: dict[str, dict[str, Build]] = {
        "bf16": {"linear": bf16, "embedding": embed},
        "aten": {"linear": aten},
        "dynamic": {"linear": dynamic},
    }
    serve(LinearWorker(builds[kind], {"torch": torch.__version__}))
