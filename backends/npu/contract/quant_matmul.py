"""The contract of ``npu_dynamic_quant`` with ``npu_quant_matmul``: int8 by int8, a scale per token.

``x1, pertoken_scale = npu_dynamic_quant(x)``, then
``y = (x1 @ x2) * scale * pertoken_scale[:, None] + bias``. ``x1`` is int8 ``[M, K]``, ``x2`` int8
``[K, N]``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qcompile.backends.npu.contract.rules import (
    LARGEST,
    Rule,
    broken,
    lies_well,
    name_of,
    unless,
)

NAME = "npu_quant_matmul"
_PAGE = "op-plugin npu_quant_matmul"
_DYNAMIC = "op-plugin npu_dynamic_quant"


@dataclass(frozen=True)
class QuantCall:
    """The arguments of a call; tensors may be on the meta device.

    Attributes:
        arch: the architecture of the target.
        output: ``output_dtype``; None means int8.
    """

    arch: str
    x1: torch.Tensor
    x2: torch.Tensor
    scale: torch.Tensor
    pertoken: torch.Tensor | None
    bias: torch.Tensor | None
    output: torch.dtype | None


@dataclass(frozen=True)
class DynamicCall:
    """The arguments of ``npu_dynamic_quant``."""

    arch: str
    x: torch.Tensor


def violated(call: QuantCall) -> str | None:
    """The first rule that a call breaks, as one line, or None."""
    return broken(RULES, call)


def violated_dynamic(call: DynamicCall) -> str | None:
    """The same for ``npu_dynamic_quant``."""
    return broken(DYNAMIC_RULES, call)


def _arch(call: QuantCall) -> str | None:
    return unless(call.arch != "310p" or call.pertoken is None, "a scale per token on 310p")


def _dtypes(call: QuantCall) -> str | None:
    found = f"x1 is {name_of(call.x1.dtype)}, x2 {name_of(call.x2.dtype)}"
    return unless(call.x1.dtype == call.x2.dtype == torch.int8, found)


def _shapes(call: QuantCall) -> str | None:
    x1, x2 = tuple(call.x1.shape), tuple(call.x2.shape)
    fits = len(x1) == len(x2) == 2 and x1[1] == x2[0] and x1[0] >= 1
    return unless(fits and max(x1[1], x2[1]) <= LARGEST, f"x1 is {x1}, x2 {x2}")


def _lies(call: QuantCall) -> str | None:
    return unless(
        call.x1.is_contiguous() and lies_well(call.x2),
        f"x1 has strides {call.x1.stride()}, x2 {call.x2.stride()}",
    )


def _scale(call: QuantCall) -> str | None:
    n = call.x2.shape[1]
    wide = call.output == torch.bfloat16
    allowed = (torch.float32, torch.bfloat16) if wide else (torch.float32,)
    fits = call.scale.dtype in allowed and tuple(call.scale.shape) in ((1,), (n,))
    found = f"scale is {name_of(call.scale.dtype)} {tuple(call.scale.shape)}, N {n}"
    return unless(fits, f"{found}, output {call.output}")


def _pertoken(call: QuantCall) -> str | None:
    if call.pertoken is None:
        return unless(call.output == torch.bfloat16, f"output {call.output} without one")
    fits = call.pertoken.dtype == torch.float32 and call.pertoken.shape == call.x1.shape[:1]
    found = f"it is {name_of(call.pertoken.dtype)} {tuple(call.pertoken.shape)}"
    return unless(fits, f"{found}, x1 has {call.x1.shape[0]} rows")


def _bias(call: QuantCall) -> str | None:
    if call.bias is None:
        return None
    allowed = (torch.int32, torch.bfloat16, torch.float32)
    fits = call.bias.dtype in allowed and tuple(call.bias.shape) == (call.x2.shape[1],)
    return unless(fits, f"bias is {name_of(call.bias.dtype)} {tuple(call.bias.shape)}")


def _output(call: QuantCall) -> str | None:
    return unless(call.output in (torch.float16, torch.bfloat16), f"output_dtype is {call.output}")


def _dynamic_dtype(call: DynamicCall) -> str | None:
    allowed = (torch.float16, torch.bfloat16)
    return unless(call.x.dtype in allowed, f"x is {name_of(call.x.dtype)}")


def _dynamic_shape(call: DynamicCall) -> str | None:
    return unless(call.x.dim() > 1 and call.x.numel() > 0, f"x is {tuple(call.x.shape)}")


def _dynamic_arch(call: DynamicCall) -> str | None:
    return unless(call.arch != "310p", "the target is 310p")


RULES: tuple[Rule[QuantCall], ...] = (
    Rule("the 310P takes no scale per token", _PAGE, _arch),
    Rule("x1 and x2 must be int8", _PAGE, _dtypes),
    Rule(f"x1 [M, K] and x2 [K, N], not empty, K and N at most {LARGEST}", _PAGE, _shapes),
    Rule("x1 must be contiguous, x2 that or the transpose of a matrix that is", _PAGE, _lies),
    Rule("the result must be float16 or bfloat16 (it is int8 unless asked)", _PAGE, _output),
    Rule("scale must be float32 (or bfloat16 with that output), [N] or [1]", _PAGE, _scale),
    Rule("the scale per token must be float32 [M]", _PAGE, _pertoken),
    Rule("bias must be int32, bfloat16 or float32 [N]", _PAGE, _bias),
)
DYNAMIC_RULES: tuple[Rule[DynamicCall], ...] = (
    Rule("x must be float16 or bfloat16", _DYNAMIC, _dynamic_dtype),
    Rule("x must have rows and two dimensions or more", _DYNAMIC, _dynamic_shape),
    Rule("npu_dynamic_quant needs an A2 or A3", _DYNAMIC, _dynamic_arch),
)
