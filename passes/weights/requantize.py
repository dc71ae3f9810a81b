"""Round a weight that no kernel takes to one that kernels take.

Before: rows of ``gguf.q6_k``, with scales for 16 columns. After: ``affine``, codes of 8 bits with a
scale for 32. Only on request, stated in the plan, and measured when the weight is packed.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from qcompile.edge import Edge
from qcompile.layout import QuantizedTensor, layout_of
from qcompile.spec import AffineSpec
from qcompile.weight import WeightRef

BITS = 8
_TOP = (1 << (BITS - 1)) - 1
_MIDDLE = 1 << (BITS - 1)
# Rows that are decoded at once hold about this many values.
_VALUES = 1 << 22


def groups_for(weight: WeightRef) -> tuple[int, ...]:
    """Sizes of groups to try, the finest first."""
    return tuple(dict.fromkeys((min(32, weight.shape[1]), weight.shape[1])))


def requantized(weight: WeightRef, group: int, dtype: torch.dtype) -> tuple[WeightRef, Edge]:
    """A weight as it would be after rounding, and the edge that rounds.

    Args:
        weight: a matrix ``[N, K]`` of any quantized spec.
        group: columns that share a scale.
        dtype: dtype of the scales, so that no later edge has to round them again.
    """
    spec = AffineSpec(BITS, group, "symmetric", dtype)

    def apply(stored: QuantizedTensor) -> QuantizedTensor:
        codes, scale = _rounded(stored.dequantize(), group, dtype)
        return QuantizedTensor(spec, "affine", stored.shape, {"codes": codes, "scale": scale})

    edge = Edge(
        weight.layout,
        "affine",
        lambda found: spec,
        apply,
        error=f"requantized to 8 bits by groups of {group}: "
        "a value moves by at most 1/252 of the largest in its group",
    )
    return replace(weight, spec=spec, layout="affine"), edge


def _rounded(
    values: torch.Tensor, group: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    n, k = values.shape
    groups = -(-k // group)
    padded = torch.nn.functional.pad(values, (0, groups * group - k)).view(n, groups, group)
    exact = padded.abs().amax(-1) / _TOP
    scale = exact.to(dtype)
    if dtype != torch.float32:
        # Rounded up, so that the largest value still has a code.
        up = (scale.view(torch.int16) + 1).view(dtype)
        scale = torch.where(scale.float() < exact, up, scale)
    step = torch.where(scale == 0, 1.0, scale.float())[..., None]
    codes = (padded / step).round().clamp(-_TOP, _TOP) + _MIDDLE
    return codes.to(torch.uint8).view(n, -1)[:, :k].contiguous(), scale


def measure(weight: WeightRef, packed: QuantizedTensor) -> float:
    """Relative L2 difference between a stored weight and what it was packed to."""
    fields = [
        *layout_of(weight.layout).fields(weight.spec, weight.shape),
        *layout_of(packed.layout).fields(packed.spec, packed.shape),
    ]
    step = math.lcm(*(part.rows for part in fields if part.rows), 1)
    rows = max(step, _VALUES // weight.shape[1] // step * step)
    difference = total = 0.0
    for start in range(0, weight.shape[0], rows):
        run = slice(start, min(start + rows, weight.shape[0]))
        exact = weight.read(run).dequantize().double()
        difference += float((packed.take_rows(run).dequantize() - exact).square().sum())
        total += float(exact.square().sum())
        weight.release()
    return math.sqrt(difference / total) if total else 0.0
