"""The vendor's operators for mixtures of experts on the CPU, from their documentation.

Comes in: calls of ``torch.ops.npu.*`` with CPU tensors. Goes out: what a device would return.
Always holds: as in ``emulator``, which registers these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from qcompile.backends.npu import nibbles
from qcompile.backends.npu.contract import grouped
from qcompile.backends.npu.contract.grouped import FinalizeCall, GroupedCall
from qcompile.backends.npu.emulation import Mode, check, current, judged, unknown

Tensors = list[torch.Tensor] | None
_ROW_MAJOR = "qcompile_row_major"


def grouped_matmul(
    x: list[torch.Tensor],
    weight: list[torch.Tensor],
    *,
    bias: Tensors = None,
    antiquant_scale: Tensors = None,
    antiquant_offset: Tensors = None,
    group_list: torch.Tensor | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    **others: Any,
) -> list[torch.Tensor]:
    """One product an expert; see ``contract.grouped``."""
    mode = current(grouped.NAME)
    unknown(grouped.NAME, others)
    check(grouped.NAME, None if len(x) == len(weight) == 1 else "several x or weights")

    def one(given: Tensors) -> torch.Tensor | None:
        return given[0] if given else None

    scale, offset, given = one(antiquant_scale), one(antiquant_offset), one(bias)
    dtype = x[0].dtype if scale is None else scale.dtype
    seen = given
    if given is not None and mode.wide:
        seen = judged(given, torch.float32 if dtype == torch.bfloat16 else dtype, mode)
    call = GroupedCall(
        mode.arch,
        judged(x[0], dtype, mode),
        weight[0],
        scale,
        offset,
        seen,
        group_list,
        split_item,
        group_type,
        group_list_type,
    )
    check(grouped.NAME, grouped.violated(call))
    return [_products(x[0], call, given, mode)]


def _products(
    x: torch.Tensor, call: GroupedCall, bias: torch.Tensor | None, mode: Mode
) -> torch.Tensor:
    assert call.group_list is not None
    ends = call.group_list if call.counts == 0 else call.group_list.cumsum(0)
    out, start = x.new_empty((x.shape[0], call.kn[1])), 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            matrix = _decoded(call, expert, torch.float32 if mode.wide else x.dtype)
            y = x[start:end].float() @ matrix
            out[start:end] = (y if bias is None else y + bias[expert].float()).to(x.dtype)
        start = end
    return out


def _decoded(call: GroupedCall, expert: int, dtype: torch.dtype) -> torch.Tensor:
    assert call.scale is not None
    assert call.offset is not None
    value = call.weight[expert]
    value = nibbles.unpack(value) if value.dtype == torch.int32 else value
    k = value.shape[0]
    scale, offset = (
        part[expert].reshape(-1, part.shape[-1]).float() for part in (call.scale, call.offset)
    )
    group = k // scale.shape[0]
    shifted = (value.float() + offset.repeat_interleave(group, 0)).to(dtype).float()
    return (shifted * scale.repeat_interleave(group, 0)).to(dtype).float()


def swiglu(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """``silu(first half) * second half``."""
    current(grouped.SWIGLU)
    first, second = input.float().chunk(2, dim)
    return (torch.nn.functional.silu(first) * second).to(input.dtype)


def moe_init_routing_v2(
    x: torch.Tensor,
    expert_idx: torch.Tensor,
    *,
    active_num: int = -1,
    expert_num: int = -1,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: list[int] | tuple[int, ...] = (),
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows sorted by expert, where each choice went, rows an expert, and nothing."""
    name = grouped.INIT
    current(name)
    unknown(name, {k: v for k, v in others.items() if k != "expert_capacity" or v != -1})
    tokens, choices = expert_idx.shape
    whole = list(active_expert_range) == [0, expert_num] and expert_tokens_num_flag
    check(name, None if whole and quant_mode == -1 else "experts of a range are not emulated")
    check(name, None if expert_idx.dtype == torch.int32 else "expert_idx must be int32")
    check(name, None if active_num == tokens * choices else f"active_num is {active_num}")
    flat = expert_idx.reshape(-1).long()
    order = torch.argsort(flat, stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    counts = torch.bincount(flat, minlength=expert_num)
    indices = place.to(torch.int32)
    # Remembered, so that finalize can tell when it reads these in the wrong order.
    setattr(indices, _ROW_MAJOR, True)
    listed = counts if expert_tokens_num_type == 1 else counts.cumsum(0)
    unused = x.new_zeros(len(order), dtype=torch.float32)  # scales, where rows are quantized
    return x[order // choices], indices, listed, unused


def moe_finalize_routing(
    expanded_permuted_rows: torch.Tensor,
    skip1: torch.Tensor | None,
    skip2: torch.Tensor | None,
    bias: torch.Tensor | None,
    scales: torch.Tensor | None,
    expanded_src_to_dst_row: torch.Tensor,
    export_for_source_row: torch.Tensor | None,
    drop_pad_mode: int | None = 0,
    k: int | None = 1,
) -> torch.Tensor:
    """For each token the weighted sum of its choices' rows."""
    name, rows, indices = grouped.FINALIZE, expanded_permuted_rows, expanded_src_to_dst_row
    current(name)
    unknown(name, {"skip1": skip1, "skip2": skip2, "bias": bias})
    check(name, None if scales is not None and export_for_source_row is not None else "no scales")
    assert scales is not None
    assert export_for_source_row is not None
    known = True if getattr(indices, _ROW_MAJOR, False) else None
    call = FinalizeCall(rows, scales, indices, export_for_source_row, drop_pad_mode or 0, known)
    check(name, grouped.violated_finalize(call))
    tokens, choices = scales.shape
    by_token = indices.view(tokens, choices)
    if drop_pad_mode != grouped.ROW_MAJOR:
        by_token = indices.view(choices, tokens).t()
    chosen = rows[by_token.reshape(-1).long()].float().view(tokens, choices, -1)
    return (chosen * scales.float()[..., None]).sum(1).to(rows.dtype)


# **** shapes, for tracing without the package ****


def grouped_shape(x: list[torch.Tensor], weight: list[torch.Tensor], **more: Any) -> Any:
    """One result, ``[M, N]``."""
    packed = nibbles.PER_WORD if weight[0].dtype == torch.int32 else 1
    return [x[0].new_empty((x[0].shape[0], weight[0].shape[-1] * packed))]


def swiglu_shape(input: torch.Tensor, dim: int = -1) -> Any:
    """Half as wide."""
    shape = list(input.shape)
    shape[dim] = shape[dim] // 2
    return input.new_empty(shape)


def init_shape(x: torch.Tensor, expert_idx: torch.Tensor, **more: Any) -> Any:
    """Rows, indices, counts, and a scale a row."""
    count = expert_idx.shape[0] * expert_idx.shape[1]
    return (
        x.new_empty((count, x.shape[1])),
        x.new_empty((count,), dtype=torch.int32),
        x.new_empty((more["expert_num"],), dtype=torch.int64),
        x.new_empty((count,), dtype=torch.float32),
    )


def finalize_shape(rows: torch.Tensor, *rest: Any, **more: Any) -> Any:
    """One row a token."""
    scales = rest[3]
    return rows.new_empty((scales.shape[0], rows.shape[1]))


OPERATORS: dict[str, Callable[..., Any]] = {
    grouped.NAME: grouped_matmul,
    grouped.SWIGLU: swiglu,
    grouped.INIT: moe_init_routing_v2,
    grouped.FINALIZE: moe_finalize_routing,
}
SHAPES: dict[str, Callable[..., Any]] = {
    grouped.NAME: grouped_shape,
    grouped.SWIGLU: swiglu_shape,
    grouped.INIT: init_shape,
    grouped.FINALIZE: finalize_shape,
}
