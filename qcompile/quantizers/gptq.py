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
    static = _static(values, spec.group, grid, order) if static_groups else None
    if order is not None:
        values, hessian = values[:, order], hessian[order][:, order]
    factor, used = inverse_factor(hessian, damp, name)
    columns = values.t().clone(memory_format=torch.contiguous_format)
    codes, scale, zero = _Run(columns, factor, grid, spec.group, static).quantize()
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


Fit = tuple[torch.Tensor, torch.Tensor]  # scales and zeros of a group, float32 ``[N]``


@dataclass
class _Run:
    """The state of one weight's quantization, its columns in the order of treatment.

    Attributes:
        columns: float32 ``[K, N]``: columns lie together, since they are treated one by one;
            corrected in place.
        factor: upper ``[K, K]``.
        grid: how a group is fitted.
        group: columns of a group.
        static: groups fitted beforehand, and the group of each column; None to fit them here.
    """

    columns: torch.Tensor
    factor: torch.Tensor
    grid: Grid
    group: int
    static: tuple[list[Fit], list[int]] | None

    def quantize(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes uint8 ``[N, K]``, scales and zeros ``[N, G]``."""
        codes = torch.empty_like(self.columns, dtype=torch.uint8)
        fits: list[Fit] = [] if self.static is None else self.static[0]
        for start, stop in _blocks(len(self.columns), self.group):
            errors = self._block(start, stop, codes, fits)
            ahead = self.factor[start:stop, stop:]
            self.columns[stop:].addmm_(ahead.t(), errors, alpha=-1)
        scale, zero = (torch.stack(column, 1) for column in zip(*fits, strict=True))
        return codes.t().contiguous(), scale, zero

    def _block(self, start: int, stop: int, codes: torch.Tensor, fits: list[Fit]) -> torch.Tensor:
        """Quantize the columns of a block; their errors ``[stop - start, N]``."""
        errors = torch.empty_like(self.columns[start:stop])
        diagonal = self.factor.diagonal()[start:stop].tolist()
        for column in range(start, stop):
            if self.static is None and column % self.group == 0:
                fits.append(self.grid.fit(self.columns[column : column + self.group].t()))
            scale, zero = fits[-1 if self.static is None else self.static[1][column]]
            values, place = self.columns[column], column - start
            code = self.grid.encode(values, scale, zero)
            codes[column] = code
            torch.div(values - (code - zero) * scale, diagonal[place], out=errors[place])
            ahead = self.factor[column, column + 1 : stop]
            self.columns[column + 1 : stop].addr_(ahead, errors[place], alpha=-1)
        return errors


def _static(
    values: torch.Tensor, group: int, grid: Grid, order: torch.Tensor | None
) -> tuple[list[Fit], list[int]]:
    """Groups fitted to a weight ``[N, K]`` as it is, and the group of each column to come."""
    places = torch.arange(values.shape[1]) if order is None else order
    return [grid.fit(piece) for piece in values.split(group, dim=1)], (places // group).tolist()


def _blocks(columns: int, group: int) -> Iterator[tuple[int, int]]:
    """Runs of columns in which no group begins that the run does not begin with or hold whole."""
    width = _BLOCK // group * group or group
    for outer in range(0, columns, width):
        end = min(outer + width, columns)
        for start in range(outer, end, _BLOCK):
            yield start, min(start + _BLOCK, end)
