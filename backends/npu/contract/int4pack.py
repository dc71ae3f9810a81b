"""The contract of ``npu_convert_weight_to_int4pack``: eight int4 of the last dimension in an int32.

``out[r, j]`` holds ``w[r, 8 j + i]`` at bits ``4 i``, in two's complement. The operator does not
look at the values: one outside -8..7 loses its high bits without a word. The rule for three
dimensions is ours, because a device of these kinds packs the first matrix alone and says nothing.
"""

from __future__ import annotations

import torch

from qcompile.backends.npu.contract.rules import Rule, broken, name_of, unless

NAME = "npu_convert_weight_to_int4pack"
_PAGE = "op-plugin npu_convert_weight_to_int4pack"
_PACKAGE = "torch_npu: a third dimension is dropped"


def violated(weight: torch.Tensor) -> str | None:
    """The first rule that a call breaks, as one line, or None."""
    return broken(RULES, weight)


def _range(weight: torch.Tensor) -> str | None:
    if weight.is_meta or not weight.numel():
        return None
    low, high = int(weight.min()), int(weight.max())
    return unless(low >= -8 and high <= 7, f"values run from {low} to {high}")


RULES: tuple[Rule[torch.Tensor], ...] = (
    Rule(
        "weight must be int32",
        _PAGE,
        lambda w: unless(w.dtype == torch.int32, f"it is {name_of(w.dtype)}"),
    ),
    Rule(
        "weight must have two dimensions",
        _PACKAGE,
        lambda w: unless(w.dim() == 2, f"it is {tuple(w.shape)}"),
    ),
    Rule(
        "weight must be contiguous",
        _PAGE,
        lambda w: unless(w.is_contiguous(), f"its strides are {w.stride()}"),
    ),
    Rule(
        "the last dimension must be a multiple of 8",
        _PAGE,
        lambda w: unless(w.shape[1] % 8 == 0, f"it is {w.shape[1]}"),
    ),
    Rule("values must be -8..7", _PAGE, _range),
)
