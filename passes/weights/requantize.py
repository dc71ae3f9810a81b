"""Round a weight that no kernel takes to one that kernels take.

Before: rows of ``gguf.q6_k``, with scales for 16 columns. After: ``affine``, codes of 8 bits with a
scale for 32. Only on request, stated in the plan, and measured when the weight is packed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from qcompile.edge import Edge
from qcompile.experts_layout import role_weight
from qcompile.layout import QuantizedTensor, layout_of
from qcompile.spec import AffineSpec, ExpertsSpec, Role, RoleSpec
from qcompile.weight import WeightRef

BITS = 8
_TOP = (1 << (BITS - 1)) - 1
_MIDDLE = 1 << (BITS - 1)
# Rows that are decoded at once hold about this many values.
_VALUES = 1 << 22


def candidates(weight: WeightRef, dtype: torch.dtype) -> Iterator[tuple[WeightRef, Edge]]:
    """What a weight may be rounded to, the least loss first.

    A matrix is tried with groups of 32 and by channels. Of experts as few roles as possible are
    rounded, by channels, which grouped products take as they are.
    """
    if isinstance(weight.spec, ExpertsSpec):
        roles = [role.role for role in weight.spec.roles]
        for count in range(1, len(roles) + 1):
            for chosen in itertools.combinations(roles, count):
                yield requantized_experts(weight, chosen, dtype)
    elif len(weight.shape) == 2:
        for group in dict.fromkeys((min(32, weight.shape[1]), weight.shape[1])):
            yield requantized(weight, group, dtype)


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


def requantized_experts(
    weight: WeightRef, chosen: Sequence[Role], dtype: torch.dtype
) -> tuple[WeightRef, Edge]:
    """As ``requantized``, for the matrices of some roles of all experts, by channels."""
    given = weight.spec
    assert isinstance(given, ExpertsSpec)
    spec = ExpertsSpec(
        tuple(_rounded_role(r, dtype) if r.role in chosen else r for r in given.roles)
    )

    def apply(stored: QuantizedTensor) -> QuantizedTensor:
        parts: dict[str, torch.Tensor] = {}
        for role in given.roles:
            if role.role not in chosen:
                prefix = f"{role.role}."
                parts.update({n: p for n, p in stored.parts.items() if n.startswith(prefix)})
                continue
            matrices = [role_weight(stored, role, e) for e in range(stored.shape[0])]
            done = [_rounded(one.dequantize(), role.columns, dtype) for one in matrices]
            parts[f"{role.role}.codes"] = torch.stack([codes for codes, _ in done])
            parts[f"{role.role}.scale"] = torch.stack([scale for _, scale in done])
        return QuantizedTensor(spec, stored.layout, stored.shape, parts)

    edge = Edge(
        weight.layout,
        weight.layout,
        lambda found: spec,
        apply,
        error=f"{' and '.join(chosen)} requantized to 8 bits by channels: "
        "a value moves by at most 1/252 of the largest in its row",
    )
    return replace(weight, spec=spec), edge


def _rounded_role(role: RoleSpec, dtype: torch.dtype) -> RoleSpec:
    return replace(role, spec=AffineSpec(BITS, role.columns, "symmetric", dtype), layout="affine")


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
    if isinstance(weight.spec, ExpertsSpec):
        return _measure_experts(weight, packed)
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


def _measure_experts(weight: WeightRef, packed: QuantizedTensor) -> float:
    assert isinstance(weight.spec, ExpertsSpec)
    assert isinstance(packed.spec, ExpertsSpec)
    after = {role.role: role for role in packed.spec.roles}
    difference = total = 0.0
    for expert in range(weight.shape[0]):
        one = weight.read(slice(expert, expert + 1))
        for role in weight.spec.roles:
            exact = role_weight(one, role, 0).dequantize().double()
            found = role_weight(packed, after[role.role], expert).dequantize()
            difference += float((found - exact).square().sum())
            total += float(exact.square().sum())
        weight.release()
    return math.sqrt(difference / total) if total else 0.0
