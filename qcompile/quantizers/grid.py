"""The grid that a group of weights is rounded to.

Comes in: float weights ``[N, C]`` whose C columns are one group. Goes out: a scale and a zero for
each row, and codes.
Always holds: a scale is a positive, finite float16 number before any code is computed, so the codes
belong to the scale that is stored; ``fit`` and ``encode`` are all there is to rounding to nearest.

With ``maxq = 2**bits - 1``, ``low = min(0, min w)`` and ``high = max(0, max w)``:

========== ============================= ==========================================
grid       scale                         zero
========== ============================= ==========================================
symmetric  ``2 * max|w| / maxq``         ``(maxq + 1) / 2``
asymmetric ``(high - low) / maxq``       ``round(-low / scale)``, within 0..maxq
========== ============================= ==========================================

and ``code = clamp(round(w / scale) + zero, 0, maxq)``. These are the formulas of GPTQ's reference
code and of GPTQModel, except that a symmetric group without negative weights has the scale above
too, where theirs is half of it and clips the upper half of the group.

>>> grid = Grid(bits=4, sym=False)
>>> w = torch.tensor([[-1.0, -0.6, 0.0, 0.25, 0.52, 1.0, 1.45, 2.0]])
>>> scale, zero = grid.fit(w)
>>> zero.tolist(), grid.encode(w, scale[:, None], zero[:, None]).tolist()
([5.0], [[0.0, 2.0, 5.0, 6.0, 8.0, 10.0, 12.0, 15.0]])
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qcompile.errors import OptionError

SCALE = torch.float16
# The smallest positive float16: a group of tinier weights still gets a scale to divide by, and the
# nearest multiples of it are no farther away than zero is.
_TINIEST = 2.0**-24
_LARGEST = torch.finfo(SCALE).max
# Widths that ``closest`` tries, relative to that of ``fit``. A symmetric grid has one code less
# above its middle than below: in the width of ``fit`` the largest positive value is clipped.
_RATIOS = (0.97, 0.94, 0.91, 0.88, 0.85, 0.8)
_SYMMETRIC_RATIOS = (1.07, 1.03, *_RATIOS)


@dataclass(frozen=True)
class Grid:
    """A family of grids.

    Attributes:
        bits: width of a code.
        sym: whether the zero is the middle code.
    """

    bits: int
    sym: bool

    @property
    def top(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    @property
    def middle(self) -> int:
        """The code that a symmetric grid decodes to 0."""
        return 1 << (self.bits - 1)

    def fit(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale and zero of each row, float32 ``[N]`` both, for finite values ``[N, C]``."""
        low, high = torch.aminmax(values, dim=1)
        low, high = low.clamp(max=0.0), high.clamp(min=0.0)
        if self.sym:
            wanted = torch.maximum(-low, high) * (2.0 / self.top)
            return _storable(wanted), torch.full_like(wanted, self.middle)
        wanted = (high - low) / self.top
        scale = _storable(wanted)
        zero = torch.round(-low / scale).clamp(0, self.top)
        # A group of zeros fits any zero; 0 is the one that GPTQ's first format cannot store.
        return scale, torch.where(wanted == 0, float(self.middle), zero)

    def closest(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Like ``fit``, but of some grids, most of them a little narrower, the closest one.

        Clipping the largest values of a group lets all others be finer: the grid with the smallest
        sum of squared errors is taken for each row, the widest where that is equal.
        """
        best = self.fit(values)
        error = self._error(values, *best)
        wide = best[0]
        for ratio in _SYMMETRIC_RATIOS if self.sym else _RATIOS:
            scale = _storable(wide * ratio)
            low = values.amin(1).clamp(max=0.0) * ratio
            zero = best[1] if self.sym else torch.round(-low / scale).clamp(0, self.top)
            found = self._error(values, scale, zero)
            better = found < error
            best = torch.where(better, scale, best[0]), torch.where(better, zero, best[1])
            error = torch.where(better, found, error)
        return best

    def _error(self, values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        """The sum of squared errors of each row, ``[N]``."""
        scale, zero = scale[:, None], zero[:, None]
        return (scale * (self.encode(values, scale, zero) - zero) - values).square().sum(1)

    def encode(self, values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        """Codes as float32; the three arguments broadcast."""
        return (torch.round(values / scale) + zero).clamp_(0, self.top)


def _storable(scale: torch.Tensor) -> torch.Tensor:
    return scale.to(SCALE).to(torch.float32).clamp(min=_TINIEST)


def check_finite(name: str, weight: torch.Tensor, bits: int) -> None:
    """Raise OptionError unless every scale of a weight will be a finite float16 number."""
    if not weight.numel():
        return
    low, high = (float(value) for value in torch.aminmax(weight))
    # Not a number compares as false.
    if not 2 * max(-low, high) / Grid(bits, True).top <= _LARGEST or low != low:
        raise _no_scale(name)


def check_scales(name: str, scale: torch.Tensor) -> None:
    """Raise OptionError when a weight's scales are no finite float16 numbers."""
    if not bool(torch.isfinite(scale).all()):
        raise _no_scale(name)


def _no_scale(name: str) -> OptionError:
    return OptionError(
        name,
        "holds NaN, infinities or values so large that their scale is beyond float16",
        f"finite weights below {torch.finfo(SCALE).max:.0f} times the largest code",
        "repair the weight, or leave it in float with skip=[...]",
    )
