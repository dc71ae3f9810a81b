"""Rounding to nearest.

Comes in: a float weight. Goes out: the same weight in the layout ``affine``.
Always holds: every code is the nearest one on its group's grid; only the weight is looked at.
"""

from __future__ import annotations

import torch

from qcompile.layout import QuantizedTensor
from qcompile.quantizers.grid import Grid, check_scales
from qcompile.spec import AffineSpec

_VALUES_AT_ONCE = 1 << 22


def grid_of(spec: AffineSpec) -> Grid:
    """The grid of a spec of form *symmetric* or *zero*."""
    return Grid(spec.bits, spec.form == "symmetric")


def quantize_rtn(
    weight: torch.Tensor, spec: AffineSpec, name: str = "weight", search: bool = False
) -> QuantizedTensor:
    """Round a weight to the grids of its groups.

    Args:
        weight: float ``[N, K]``; the last group may have fewer than ``spec.group`` columns.
        spec: form *symmetric* or *zero*. The order may be *permuted*; the groups then run in order
            all the same, and ``g_idx`` says so.
        name: what to call the weight in an error.
        search: take the closest of some grids for each group, not the one from its smallest to its
            largest value.

    Returns:
        codes uint8 ``[N, K]``, scale ``[N, G]``, zero int32 ``[N, G]`` for the form *zero*, on the
        CPU.

    Raises:
        OptionError: the weight is not finite, or too large for float16 scales.
    """
    rows = max(1, _VALUES_AT_ONCE // weight.shape[1])
    pieces = [_round(piece.detach().float(), spec, search) for piece in weight.split(rows)]
    codes, scale, zero = (torch.cat(column) for column in zip(*pieces, strict=True))
    check_scales(name, scale)
    return affine(codes, scale, zero, spec)


def affine(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    spec: AffineSpec,
    g_idx: torch.Tensor | None = None,
) -> QuantizedTensor:
    """A record in the layout ``affine`` from codes ``[N, K]`` and scales and zeros ``[N, G]``."""
    parts = {"codes": codes.to("cpu", torch.uint8), "scale": scale.to("cpu", spec.scale)}
    if spec.form == "zero":
        parts["zero"] = zero.to("cpu", torch.int32)
    if spec.order != "sequential":
        groups = torch.arange(codes.shape[1]) // spec.group if g_idx is None else g_idx
        parts["g_idx"] = groups.to("cpu", torch.int32)
    return QuantizedTensor(spec, "affine", tuple(codes.shape), parts)


def _round(values: torch.Tensor, spec: AffineSpec, search: bool) -> tuple[torch.Tensor, ...]:
    grid = grid_of(spec)
    codes = torch.empty(values.shape, dtype=torch.uint8, device=values.device)
    scales, zeros = [], []
    for start in range(0, values.shape[1], spec.group):
        columns = values[:, start : start + spec.group]
        scale, zero = grid.closest(columns) if search else grid.fit(columns)
        codes[:, start : start + spec.group] = grid.encode(columns, scale[:, None], zero[:, None])
        scales.append(scale)
        zeros.append(zero)
    return codes, torch.stack(scales, 1), torch.stack(zeros, 1)
