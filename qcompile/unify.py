"""Weights that differ in width or group, as weights of one spec.

Comes in: weights of one shape. Goes out: the same weights with one spec.
Always holds: no value changes: codes keep their distance from the zero point in a wider field, and
a scale is repeated for every part of its group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from qcompile.edge import find_route
from qcompile.layout import QuantizedTensor
from qcompile.spec import AffineSpec
from qcompile.weight import Rows, WeightRef


def unified(weights: Sequence[WeightRef]) -> list[WeightRef]:
    """The weights with one spec and layout, where integers with scales allow it; else as given.

    Args:
        weights: of one shape. Those that are alike already are returned as they are.
    """
    first = weights[0]
    if all((w.spec, w.layout) == (first.spec, first.layout) for w in weights):
        return list(weights)
    spec = _common([weight.spec for weight in weights])
    if spec is None or any(find_route(w.layout, w.spec, "affine") is None for w in weights):
        return list(weights)
    return [_as(weight, spec) for weight in weights]


def _common(specs: Sequence[object]) -> AffineSpec | None:
    affine = [spec for spec in specs if isinstance(spec, AffineSpec)]
    fits = all(s.form != "offset" and s.order == "sequential" for s in affine)
    if len(affine) < len(specs) or not fits:
        return None
    scales = {spec.scale for spec in affine}
    return AffineSpec(
        max(spec.bits for spec in affine),
        math.gcd(*(spec.group for spec in affine)),
        "zero" if any(spec.form == "zero" for spec in affine) else "symmetric",
        scales.pop() if len(scales) == 1 else torch.float32,
    )


def _as(weight: WeightRef, target: AffineSpec) -> WeightRef:
    spec, route = weight.spec, find_route(weight.layout, weight.spec, "affine")
    assert isinstance(spec, AffineSpec)
    assert route is not None
    bits, group, symmetric = spec.bits, spec.group, spec.form == "symmetric"
    # Around the middle of the wider field kernels keep sums of codes small.
    shift = (1 << (target.bits - 1)) - (1 << (bits - 1))

    def read(rows: Rows) -> QuantizedTensor:
        plain = route.apply(weight.read(rows))
        n, k = plain.shape

        def spread(part: torch.Tensor) -> torch.Tensor:
            return part.repeat_interleave(group // target.group, 1)[:, : -(-k // target.group)]

        parts = {
            "codes": plain.parts["codes"] + shift,
            "scale": spread(plain.parts["scale"]).to(target.scale).contiguous(),
        }
        if target.form == "zero":
            middle = torch.full(plain.parts["scale"].shape, 1 << (bits - 1), dtype=torch.int32)
            zero = middle if symmetric else plain.parts["zero"]
            parts["zero"] = spread(zero + shift).contiguous()
        return QuantizedTensor(target, "affine", (n, k), parts)

    facts = f"{weight.facts}; held as {target} beside experts of other widths".lstrip("; ")
    return replace(weight, spec=target, layout="affine", read=read, facts=facts)
