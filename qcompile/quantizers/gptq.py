"""GPTQ: rounding column by column, the error of each corrected in the columns to come.

Comes in: a float weight and the Hessian of its inputs. Goes out: codes on the grids of its groups,
and how much of the output they lose on the calibration data.
Always holds: groups are fitted to the weights as earlier columns' corrections left them (unless
they are static); damping is raised until the Hessian can be factored; the result is finite.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers"
(ICLR 2023), algorithm 1, with the act-order and static groups of its authors' later code. A column
that no calibration input touched (its diagonal of the Hessian is 0) is rounded to nearest, where
the authors' code sets it to zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from qcompile.errors import OptionError
from qcompile.layout import QuantizedTensor
from qcompile.quantizers.grid import Grid, check_scales
from qcompile.quantizers.rtn import affine, grid_of
from qcompile.spec import AffineSpec

_BLOCK = 128
_RAISES = 8  # each multiplies the damping by 4: from 0.01 to beyond 100 times the mean diagonal


@dataclass(frozen=True)
class Result:
    """A weight that GPTQ quantized.

    Attributes:
        weight: in the layout ``affine``.
        loss: ``|x (w - w')|**2 / |x w|**2`` over the calibration inputs x.
        damp: the damping that was needed, relative to the mean diagonal of the Hessian.
    """

    weight: QuantizedTensor
    loss: float
    damp: float


def quantize_gptq(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    spec: AffineSpec,
    *,
    act_order: bool = False,
    static_groups: bool = False,
    damp: float = 0.01,
    name: str = "weight",
) -> Result:
    """Quantize one weight.

    Args:
        weight: float ``[N, K]``; not changed.
        hessian: float32 ``[K, K]``, the mean of ``x.T x`` over calibration inputs; not changed.
        spec: form *symmetric* or *zero*; the order is *permuted* when act-order makes groups of
            columns that do not lie side by side.
        act_order: treat the columns with the largest inputs first.
        static_groups: fit groups to the original weight, in its own order of columns.
        damp: added to the diagonal, relative to its mean; raised when that is not enough.
        name: what to call the weight in an error.

    Raises:
        OptionError: the weight or the Hessian is not finite.
    """
    check_scales(name, weight.detach().float().abs().amax()[None])
    diagonal = _checked_diagonal(hessian, name)
    order = torch.argsort(diagonal, descending=True, stable=True) if act_order else None
    values = weight.detach().float()
    grid = grid_of(spec)
    groups = _static(values, grid, spec.group, order) if static_groups else None
    if order is not None:
        values, hessian = values[:, order], hessian[order][:, order]
    factor, used = inverse_factor(hessian, damp, name)
    run = _Run(values.clone(), factor, grid, spec.group, groups)
    codes, scale, zero = run.quantize()
    check_scales(name, scale)
    g_idx = None
    if order is not None:
        places = torch.argsort(order)
        codes = codes[:, places]
        # A static group is a run of the original columns; a fitted one is a run of the order.
        g_idx = None if static_groups else (places // spec.group).to(torch.int32)
        values, hessian = values[:, places], hessian[places][:, places]
    quantized = affine(codes, scale, zero, spec, g_idx)
    return Result(quantized, relative_loss(values, quantized, hessian), used)


def relative_loss(weight: torch.Tensor, quantized: QuantizedTensor, hessian: torch.Tensor) -> float:
    """``|x (w - w')|**2 / |x w|**2`` over the inputs of a Hessian; 0 when there is no output."""
    error = weight - quantized.dequantize().to(weight.device)
    whole = float(((weight @ hessian) * weight).sum())
    return float(((error @ hessian) * error).sum()) / whole if whole > 0 else 0.0


def inverse_factor(hessian: torch.Tensor, damp: float, name: str) -> tuple[torch.Tensor, float]:
    """Upper ``U`` with ``U.T U`` the inverse of the damped Hessian, and the damping it took."""
    diagonal = hessian.diagonal()
    dead = diagonal <= 0
    mean = float(diagonal[~dead].mean()) if not bool(dead.all()) else 1.0
    for step in range(_RAISES):
        used = damp * 4**step
        damped = hessian.clone()
        damped.diagonal().add_(used * mean + dead.float() * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if failed:
            continue
        upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if not failed and bool(torch.isfinite(upper).all()):
            return upper, used
    raise OptionError(
        name,
        f"the Hessian of its inputs has no Cholesky factor, damped with up to {used:.0f} times its "
        "mean diagonal",
        "calibration inputs of a sane range",
        "calibrate in float32, with more data, or leave the module in float with skip=[...]",
    )


def _checked_diagonal(hessian: torch.Tensor, name: str) -> torch.Tensor:
    if bool(torch.isfinite(hessian).all()):
        return hessian.diagonal()
    raise OptionError(
        name,
        "received NaN or infinities as calibration inputs",
        "finite inputs",
        "check the calibration data, or calibrate in float32 or bfloat16",
    )


@dataclass(frozen=True)
class _Groups:
    """Scales and zeros ``[N, G]`` fitted beforehand, and the group of each place."""

    scale: torch.Tensor
    zero: torch.Tensor
    of: list[int]


def _static(values: torch.Tensor, grid: Grid, group: int, order: torch.Tensor | None) -> _Groups:
    fitted = [grid.fit(piece) for piece in values.split(group, dim=1)]
    scale, zero = (torch.stack(column, 1) for column in zip(*fitted, strict=True))
    columns = torch.arange(values.shape[1]) if order is None else order
    return _Groups(scale, zero, (columns // group).tolist())


@dataclass
class _Run:
    """The state of one weight's quantization, its columns in the order of treatment.

    Attributes:
        values: float32 ``[N, K]``, corrected in place.
        factor: upper ``[K, K]``.
        grid: how a group is fitted.
        group: columns of a group.
        groups: groups fitted beforehand, or None.
    """

    values: torch.Tensor
    factor: torch.Tensor
    grid: Grid
    group: int
    groups: _Groups | None

    def quantize(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes uint8 ``[N, K]``, scales and zeros ``[N, G]``."""
        rows, columns = self.values.shape
        count = -(-columns // self.group)
        codes = torch.empty((rows, columns), dtype=torch.uint8, device=self.values.device)
        scale, zero = self.values.new_empty((2, rows, count))
        if self.groups is not None:
            scale, zero = self.groups.scale, self.groups.zero
        for start, stop in _blocks(columns, self.group):
            errors = self._block(start, stop, codes, scale, zero)
            self.values[:, stop:] -= errors @ self.factor[start:stop, stop:]
        return codes, scale, zero

    def _block(
        self, start: int, stop: int, codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor
    ) -> torch.Tensor:
        """Quantize the columns of a block; their errors ``[N, stop - start]``."""
        errors = self.values.new_empty((len(self.values), stop - start))
        for column in range(start, stop):
            place = column // self.group
            if self.groups is not None:
                place = self.groups.of[column]
            elif column % self.group == 0:
                run = self.values[:, column : column + self.group]
                scale[:, place], zero[:, place] = self.grid.fit(run)
            values = self.values[:, column]
            code = self.grid.encode(values, scale[:, place], zero[:, place])
            codes[:, column] = code
            error = (values - (code - zero[:, place]) * scale[:, place]) / self.factor[
                column, column
            ]
            self.values[:, column:stop] -= error[:, None] * self.factor[column, column:stop]
            errors[:, column - start] = error
        return errors


def _blocks(columns: int, group: int) -> Iterator[tuple[int, int]]:
    """Runs of columns in which no group begins that the run does not begin with or hold whole."""
    width = _BLOCK // group * group or group
    for outer in range(0, columns, width):
        end = min(outer + width, columns)
        for start in range(outer, end, _BLOCK):
            yield start, min(start + _BLOCK, end)
