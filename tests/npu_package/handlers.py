"""What the pretended device's operators compute.

Comes in: arguments as torch_npu's C++ code hands them to the device. Goes out: results written in
place. Always holds: the operators with a contract are the emulator of the backend, on the arguments
that the device would see, so that its rules judge what the package makes of a call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from qcompile.backends.npu import emulator, emulator_experts
from qcompile.backends.npu.emulation import Mode, emulating

Tensor = torch.Tensor
_NUMBERS = {torch.float16: 5, torch.bfloat16: 15, torch.int8: 1}


def _weight_quant(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    offset: Tensor | None,
    quant_scale: Tensor | None,
    quant_offset: Tensor | None,
    bias: Tensor | None,
    group: int,
    out: Tensor,
) -> None:
    out.copy_(
        emulator.weight_quant_batchmatmul(
            x, weight, scale, offset, quant_scale, quant_offset, bias, group
        )
    )


def _dynamic(x: Tensor, smooth: Tensor | None, codes: Tensor, scale: Tensor) -> None:
    found = emulator.dynamic_quant(x, smooth_scales=smooth)
    codes.copy_(found[0])
    scale.copy_(found[1])


def _dynamic_v2(
    x: Tensor,
    smooth: Tensor | None,
    index: Tensor | None,
    dtype: int,
    codes: Tensor,
    scale: Tensor,
    offset: Tensor | None,
) -> None:
    assert index is None
    _dynamic(x, smooth, codes, scale)


def _quant(
    x1: Tensor,
    x2: Tensor,
    token: Tensor | None,
    scale: Tensor,
    y_scale: Tensor | None,
    x1_offset: Tensor | None,
    offset: Tensor | None,
    y_offset: Tensor | None,
    bias: Tensor | None,
    turned1: int,
    turned2: int,
    group: int,
    out: Tensor,
) -> None:
    assert not turned1
    # The package hands on empty tensors for some arguments that nobody gave.
    assert not any(x is not None and x.numel() for x in (y_scale, x1_offset, y_offset))
    found = emulator.quantized_matmul(
        x1,
        x2.t() if turned2 else x2,
        scale,
        offset=offset,
        pertoken_scale=token,
        bias=bias,
        output_dtype=_NUMBERS[out.dtype],
    )
    out.copy_(found)


def _grouped(
    x: list[Tensor],
    weight: list[Tensor],
    bias: list[Tensor] | None,
    scale: list[Tensor] | None,
    offset: list[Tensor] | None,
    antiquant_scale: list[Tensor] | None,
    antiquant_offset: list[Tensor] | None,
    token: list[Tensor] | None,
    rows: Tensor,
    *rest: Any,
) -> None:
    assert not any((scale, offset, token))
    split, kind, counts, activation = rest[3:7]
    [out] = rest[-3]
    assert activation == 0
    found = emulator_experts.grouped_matmul(
        x,
        weight,
        bias=bias or None,
        antiquant_scale=antiquant_scale or None,
        antiquant_offset=antiquant_offset or None,
        group_list=rows,
        split_item=split,
        group_type=kind,
        group_list_type=counts,
    )
    out.copy_(found[0])


def _init(
    x: Tensor,
    experts: Tensor,
    scale: Tensor | None,
    offset: Tensor | None,
    active: int,
    capacity: int,
    count: int,
    drop: int,
    kind: int,
    flag: int,
    quant: int,
    span: list[int],
    row_type: int,
    rows: Tensor,
    indices: Tensor,
    tokens: Tensor,
    unused: Tensor | None,
) -> None:
    assert scale is None or not scale.numel()
    assert drop == row_type == 0
    found = emulator_experts.moe_init_routing_v2(
        x,
        experts,
        active_num=active,
        expert_num=count,
        expert_tokens_num_type=kind,
        expert_tokens_num_flag=bool(flag),
        quant_mode=quant,
        active_expert_range=span,
    )
    for made, given in zip((rows, indices, tokens), found, strict=False):
        made.copy_(given)


def _finalize(
    rows: Tensor,
    indices: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor | None,
    experts: Tensor | None,
    mode: int,
    out: Tensor,
) -> None:
    # The device keeps no memory of where indices came from, so the rule on the mode is not asked.
    out.copy_(
        emulator_experts.moe_finalize_routing(
            rows, skip1, skip2, bias, scales, indices, experts, mode
        )
    )


def _sort(x: Tensor, stable: int, dim: int, down: int, values: Tensor, places: Tensor) -> None:
    # Of the flags, which are C's bool, only the lowest byte is set.
    found = x.sort(dim=dim, stable=True, descending=bool(down & 255))
    values.copy_(found.values)
    places.copy_(found.indices)


def _matmul(a: Tensor, b: Tensor, out: Tensor, how: int) -> None:
    out.copy_(a.float() @ b.float())


HANDLERS: dict[str, Callable[..., Any]] = {
    "aclnnInplaceCopy": lambda to, source: to.copy_(source),
    "aclnnCast": lambda x, dtype, out: out.copy_(x),
    "aclnnInplaceZero": lambda x: x.zero_(),
    "aclnnInplaceOne": lambda x: x.fill_(1),
    "aclnnInplaceFillScalar": lambda x, value: x.fill_(value),
    "aclnnAdd": lambda a, b, alpha, out: out.copy_(a + alpha * b),
    "aclnnAdds": lambda a, b, alpha, out: out.copy_(a + alpha * b),
    "aclnnBitwiseAndScalar": lambda a, b, out: out.copy_(a & int(b)),
    "aclnnBitwiseXorScalar": lambda a, b, out: out.copy_(a ^ int(b)),
    "aclnnCat": lambda items, dim, out: out.copy_(torch.cat(items, dim)),
    "aclnnClamp": lambda x, low, high, out: out.copy_(x.clamp(low, high)),
    "aclnnGather": lambda x, dim, index, out: out.copy_(x.gather(dim, index)),
    "aclnnIndexSelect": lambda x, dim, index, out: out.copy_(x.index_select(dim, index)),
    "aclnnMatmul": _matmul,
    "aclnnMm": _matmul,
    "aclnnMul": lambda a, b, out: out.copy_(a * b),
    "aclnnMuls": lambda a, b, out: out.copy_(a * b),
    "aclnnRepeatInterleaveIntWithDim": lambda x, count, dim, size, out: out.copy_(
        x.repeat_interleave(count, dim)
    ),
    "aclnnRightShift": lambda a, b, out: out.copy_(a >> b),
    "aclnnSigmoid": lambda x, out: out.copy_(x.sigmoid()),
    "aclnnSort": _sort,
    "aclnnStack": lambda items, dim, out: out.copy_(torch.stack(items, dim)),
    "aclnnSub": lambda a, b, alpha, out: out.copy_(a - alpha * b),
    "aclnnSubs": lambda a, b, alpha, out: out.copy_(a - alpha * b),
    "aclnnDynamicQuant": _dynamic,
    "aclnnDynamicQuantV2": _dynamic_v2,
    "aclnnGroupedMatmulV4": _grouped,
    "aclnnGroupedMatmulV5": _grouped,
    "aclnnMoeFinalizeRoutingV2": _finalize,
    "aclnnMoeInitRoutingV3": _init,
    "aclnnSwiGlu": lambda x, dim, out: out.copy_(emulator_experts.swiglu(x, dim)),
    "aclnnQuantMatmulV5": _quant,
    "aclnnWeightQuantBatchMatmulV2": _weight_quant,
}


def handlers(mode: Mode) -> dict[str, Callable[..., Any]]:
    """The handlers, with the emulator's rules those of a device."""

    def under(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            with emulating(mode):
                return function(*given)

        return run

    return {name: under(function) for name, function in HANDLERS.items()}
