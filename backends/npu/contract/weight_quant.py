"""The contract of ``npu_weight_quant_batchmatmul``.

``y = x @ ((weight + antiquant_offset) * antiquant_scale) + bias``: the offset is ADDED, before the
scale. ``weight`` is ``[K, N]``, int8 or int4; eight int4 lie in an int32 along the dimension that
is contiguous in memory. Scale and offset are ``[ceil(K / group), N]``, or ``[1, N]`` for a channel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qcompile.backends.npu.contract.rules import (
    LARGEST,
    Rule,
    broken,
    is_turned,
    lies_well,
    name_of,
    unless,
)

NAME = "npu_weight_quant_batchmatmul"
PER_WORD = 8
_PAGE = "op-plugin npu_weight_quant_batchmatmul"
_ACLNN = "aclnnWeightQuantBatchMatmulV2"


@dataclass(frozen=True)
class WeightQuantCall:
    """The arguments of a call; tensors may be on the meta device.

    Attributes:
        arch: the architecture of the target.
        group: ``antiquant_group_size``; 0 where a channel, or everything, shares a scale.
    """

    arch: str
    x: torch.Tensor
    weight: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor | None
    bias: torch.Tensor | None
    group: int

    @property
    def turned(self) -> bool:
        """Whether the weight is the transpose of what lies in memory."""
        return is_turned(self.weight)

    @property
    def kn(self) -> tuple[int, int]:
        """K and N, counted in weights."""
        k, n = self.weight.shape
        if self.weight.dtype != torch.int32:
            return k, n
        return (k * PER_WORD, n) if self.turned else (k, n * PER_WORD)


def violated(call: WeightQuantCall) -> str | None:
    """The first rule that a call breaks, as one line, or None."""
    return broken(RULES, call)


def _x_dtype(call: WeightQuantCall) -> str | None:
    allowed = (torch.float16,) if call.arch == "310p" else (torch.float16, torch.bfloat16)
    return unless(call.x.dtype in allowed, f"x is {name_of(call.x.dtype)} on {call.arch}")


def _weight_dtype(call: WeightQuantCall) -> str | None:
    allowed = (torch.int8,) if call.arch == "310p" else (torch.int8, torch.int32)
    found = f"weight is {name_of(call.weight.dtype)} on {call.arch}"
    return unless(call.weight.dtype in allowed, found)


def _two_dimensions(call: WeightQuantCall) -> str | None:
    shapes = tuple(call.x.shape), tuple(call.weight.shape)
    return unless(call.x.dim() == call.weight.dim() == 2, f"x and weight are {shapes}")


def _rows(call: WeightQuantCall) -> str | None:
    return unless(call.x.shape[0] >= 1, "x has no rows")


def _lies(call: WeightQuantCall) -> str | None:
    for name, tensor in (("x", call.x), ("weight", call.weight)):
        if not lies_well(tensor):
            return f"{name} {tuple(tensor.shape)} has strides {tensor.stride()}"
    return None


def _one_output(call: WeightQuantCall) -> str | None:
    narrow = call.weight.dtype == torch.int32 and call.weight.shape[1] == 1 and call.turned
    return unless(not narrow, f"N is 1 with a transposed int4 weight {tuple(call.weight.shape)}")


def _extents(call: WeightQuantCall) -> str | None:
    k, n = call.kn
    if call.x.shape[1] != k:
        return f"x has {call.x.shape[1]} columns, weight {k} rows"
    return unless(1 <= k <= LARGEST and 1 <= n <= LARGEST, f"K is {k}, N is {n}")


def _group(call: WeightQuantCall) -> str | None:
    k, g = call.kn[0], call.group
    return unless(g == 0 or (g % 32 == 0 and 32 <= g <= k - 1), f"the group is {g}, K is {k}")


def _no_groups(call: WeightQuantCall) -> str | None:
    return unless(call.arch != "310p" or call.group == 0, f"the group is {call.group} on 310p")


def _scale_dtype(call: WeightQuantCall) -> str | None:
    found = f"scale is {name_of(call.scale.dtype)}, x {name_of(call.x.dtype)}"
    return unless(call.scale.dtype == call.x.dtype, found)


def _scale_shape(call: WeightQuantCall) -> str | None:
    k, n = call.kn
    grouped = [(-(-k // call.group), n)] if call.group else [(1,), (1, 1), (n,), (1, n)]
    shape = tuple(call.scale.shape)
    return unless(shape in grouped, f"scale is {shape}, group {call.group}, K {k}, N {n}")


def _offset(call: WeightQuantCall) -> str | None:
    if call.offset is None:
        return None
    same = call.offset.dtype == call.scale.dtype and call.offset.shape == call.scale.shape
    found = f"offset is {name_of(call.offset.dtype)} {tuple(call.offset.shape)}"
    return unless(same, f"{found}, scale {name_of(call.scale.dtype)} {tuple(call.scale.shape)}")


def _scale_lies(call: WeightQuantCall) -> str | None:
    for name, part in (("scale", call.scale), ("offset", call.offset)):
        if part is None or part.dim() < 2 or min(part.shape) == 1:
            continue  # a vector lies the same either way
        if is_turned(part) != call.turned or not lies_well(part):
            way = "transposed" if call.turned else "not transposed"
            return f"{name} {tuple(part.shape)} has strides {part.stride()}, weight is {way}"
    return None


def _bias(call: WeightQuantCall) -> str | None:
    if call.bias is None:
        return None
    n = call.kn[1]
    wanted = torch.float32 if call.x.dtype == torch.bfloat16 else torch.float16
    fits = tuple(call.bias.shape) in ((n,), (1, n)) and call.bias.is_contiguous()
    found = f"bias is {name_of(call.bias.dtype)} {tuple(call.bias.shape)}"
    return unless(fits and call.bias.dtype == wanted, f"{found}, x {name_of(call.x.dtype)}")


RULES: tuple[Rule[WeightQuantCall], ...] = (
    Rule("x must be float16 or bfloat16 (310P: float16)", _PAGE, _x_dtype),
    Rule("weight must be int8, or int4 in int32 (310P: int8)", _PAGE, _weight_dtype),
    Rule("x and weight must have two dimensions", _ACLNN, _two_dimensions),
    Rule("empty tensors are not taken", _PAGE, _rows),
    Rule("x and weight must be contiguous, or transposes of contiguous matrices", _ACLNN, _lies),
    Rule("a transposed int4 weight needs N of 2 or more", _PAGE, _one_output),
    Rule(f"K and N must agree and be at most {LARGEST}", _PAGE, _extents),
    Rule("the group must be 0, or a multiple of 32 from 32 to K - 1", _PAGE, _group),
    Rule("the 310P takes scales per channel only", _PAGE, _no_groups),
    Rule("scale must have the dtype of x", _PAGE, _scale_dtype),
    Rule("scale must be [ceil(K / group), N], or [1, N] without groups", _PAGE, _scale_shape),
    Rule("offset must have the dtype and the shape of scale", _PAGE, _offset),
    # The host code reads the storage of the scales in the order of the weight's: what lies the
    # other way passes every check of a device and is misread without a word.
    Rule("scale and offset must be transposed exactly when weight is", _ACLNN, _scale_lies),
    Rule("bias must be [N]; float16 for float16 x, float32 for bfloat16", _PAGE, _bias),
)
