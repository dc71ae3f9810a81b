"""The contract of ``npu_grouped_matmul`` with packed weights, and of the routing around it.

``y[rows of e] = x[rows of e] @ ((weight[e] + offset[e]) * scale[e]) + bias[e]``, where the rows of
an expert follow each other and ``group_list`` counts them. ``weight`` is int8 ``[E, K, N]`` or int4
in int32 ``[E, K, N / 8]``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qcompile.backends.npu.contract.rules import LARGEST, Rule, broken, name_of, unless

NAME = "npu_grouped_matmul"
PER_WORD = 8
_PAGE = "op-plugin npu_grouped_matmul"
_ACLNN = "aclnnGroupedMatmulV5"
_EXPERTS = 1024


@dataclass(frozen=True)
class GroupedCall:
    """The arguments of a call with one x and one weight; tensors may be on the meta device.

    Attributes:
        arch: the architecture of the target.
        counts: ``group_list_type``: 1 for counts, 0 for running sums.
    """

    arch: str
    x: torch.Tensor
    weight: torch.Tensor
    scale: torch.Tensor | None
    offset: torch.Tensor | None
    bias: torch.Tensor | None
    group_list: torch.Tensor | None
    split_item: int | None
    group_type: int | None
    counts: int | None

    @property
    def kn(self) -> tuple[int, int]:
        """K and N, counted in weights."""
        _, k, n = self.weight.shape
        return k, n * (PER_WORD if self.weight.dtype == torch.int32 else 1)


def violated(call: GroupedCall) -> str | None:
    """The first rule that a call breaks, as one line, or None."""
    return broken(RULES, call)


def _arch(call: GroupedCall) -> str | None:
    return unless(call.arch != "310p", "the target is 310p")


def _x(call: GroupedCall) -> str | None:
    fits = call.x.dtype in (torch.float16, torch.bfloat16) and call.x.dim() == 2
    return unless(fits and call.x.is_contiguous(), f"x is {name_of(call.x.dtype)} {call.x.shape}")


def _weight(call: GroupedCall) -> str | None:
    weight = call.weight
    fits = weight.dtype in (torch.int8, torch.int32) and weight.dim() == 3
    found = f"weight is {name_of(weight.dtype)} {tuple(weight.shape)}, strides {weight.stride()}"
    return unless(fits and weight.is_contiguous(), found)


def _extents(call: GroupedCall) -> str | None:
    (k, n), count = call.kn, call.weight.shape[0]
    fits = call.x.shape[1] == k and k <= LARGEST and n <= LARGEST and count <= _EXPERTS
    return unless(fits, f"x has {call.x.shape[1]} columns, K is {k}, N {n}, experts {count}")


def _kind(call: GroupedCall) -> str | None:
    fits = call.group_type == 0 and call.split_item in (2, 3)
    return unless(fits, f"group_type is {call.group_type}, split_item {call.split_item}")


def _both(call: GroupedCall) -> str | None:
    missing = [n for n in ("scale", "offset") if getattr(call, n) is None]
    return unless(not missing, f"antiquant_{' and '.join(missing)} is missing")


def _vectors(call: GroupedCall) -> str | None:
    assert call.scale is not None
    assert call.offset is not None
    same = call.scale.dtype == call.offset.dtype == call.x.dtype
    found = f"scale is {name_of(call.scale.dtype)} {tuple(call.scale.shape)}"
    found += f", offset {name_of(call.offset.dtype)} {tuple(call.offset.shape)}"
    return unless(same and call.scale.shape == call.offset.shape, found)


def _groups(call: GroupedCall) -> str | None:
    assert call.scale is not None
    shape, count, (k, n) = tuple(call.scale.shape), call.weight.shape[0], call.kn
    if shape == (count, n):
        return None
    if call.weight.dtype == torch.int8:
        return f"scale is {shape} with an int8 weight, E {count}, N {n}"
    fits = len(shape) == 3 and shape[0] == count and shape[2] == n and k % shape[1] == 0
    return unless(fits, f"scale is {shape}, E {count}, K {k}, N {n}")


def _bias(call: GroupedCall) -> str | None:
    if call.bias is None:
        return None
    wanted = torch.float32 if call.x.dtype == torch.bfloat16 else torch.float16
    fits = tuple(call.bias.shape) == (call.weight.shape[0], call.kn[1])
    found = f"bias is {name_of(call.bias.dtype)} {tuple(call.bias.shape)}"
    return unless(fits and call.bias.dtype == wanted, f"{found}, x {name_of(call.x.dtype)}")


def _rows(call: GroupedCall) -> str | None:
    given = call.group_list
    if given is None or given.dtype != torch.int64 or tuple(given.shape) != call.weight.shape[:1]:
        return f"group_list is {None if given is None else (given.dtype, tuple(given.shape))}"
    if given.is_meta or not given.numel():
        return None
    total = int(given.sum() if call.counts == 1 else given[-1])
    return unless(total == call.x.shape[0], f"it names {total} rows of {call.x.shape[0]}")


RULES: tuple[Rule[GroupedCall], ...] = (
    Rule("packed weights need an A2 or A3", _PAGE, _arch),
    Rule("x must be float16 or bfloat16 [M, K], contiguous", _ACLNN, _x),
    Rule("weight must be int8 or int4 in int32, [E, K, N], contiguous", _ACLNN, _weight),
    Rule(f"K must agree; K and N at most {LARGEST}, {_EXPERTS} experts", _PAGE, _extents),
    Rule("group_type must be 0 and split_item 2 or 3, with one result", _ACLNN, _kind),
    Rule("antiquant_scale and antiquant_offset are both needed", _ACLNN, _both),
    Rule("scale and offset must have the dtype of x, and one shape", _ACLNN, _vectors),
    Rule("scale must be [E, N]; for int4 also [E, G, N], where G divides K", _ACLNN, _groups),
    Rule("bias must be [E, N]; float16 for float16 x, float32 for bfloat16", _PAGE, _bias),
    Rule("group_list must be int64 [E] and name every row of x", _PAGE, _rows),
)


# **** routing ****

INIT, FINALIZE, SWIGLU = "npu_moe_init_routing_v2", "npu_moe_finalize_routing", "npu_swiglu"
# finalize reads the indices that init_routing_v2 makes, token by token, in this mode alone.
ROW_MAJOR = 2


@dataclass(frozen=True)
class FinalizeCall:
    """The arguments of ``npu_moe_finalize_routing``.

    Attributes:
        row_major: whether the indices come from ``npu_moe_init_routing_v2``; None if unknown.
    """

    rows: torch.Tensor
    scales: torch.Tensor
    indices: torch.Tensor
    experts: torch.Tensor
    mode: int
    row_major: bool | None


def violated_finalize(call: FinalizeCall) -> str | None:
    """The first rule that a call breaks, as one line, or None."""
    return broken(FINALIZE_RULES, call)


def _dtypes(call: FinalizeCall) -> str | None:
    found = f"scales are {name_of(call.scales.dtype)}, rows {name_of(call.rows.dtype)}"
    return unless(call.scales.dtype == call.rows.dtype, found)


def _indices(call: FinalizeCall) -> str | None:
    count = call.scales.numel()
    fits = call.indices.dtype == call.experts.dtype == torch.int32
    fits = fits and call.indices.shape == (count,) and call.experts.shape == call.scales.shape
    found = f"indices are {name_of(call.indices.dtype)} {tuple(call.indices.shape)}"
    return unless(fits, f"{found}, scales {tuple(call.scales.shape)}")


def _mode(call: FinalizeCall) -> str | None:
    fits = call.row_major is None or call.row_major == (call.mode == ROW_MAJOR)
    return unless(fits, f"drop_pad_mode is {call.mode}, row_major {call.row_major}")


_FINALIZE_PAGE = f"op-plugin {FINALIZE}"
FINALIZE_RULES: tuple[Rule[FinalizeCall], ...] = (
    Rule("scales must have the dtype of the rows", _FINALIZE_PAGE, _dtypes),
    Rule("indices must be int32, one for each choice", _FINALIZE_PAGE, _indices),
    # The other mode reads them choice by choice and returns other tokens' rows without a word.
    Rule("indices of npu_moe_init_routing_v2 need drop_pad_mode 2", _FINALIZE_PAGE, _mode),
)
