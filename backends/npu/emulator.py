"""The vendor's operators on the CPU, from their documentation.

Comes in: calls of ``torch.ops.npu.*`` with CPU tensors. Goes out: what a device would return, or a
LowerError with the rule that the call breaks.
Always holds: an operator runs here only inside ``emulating``; else it raises, so that nothing is
ever emulated without having been asked for. Without the vendor's package the operators are defined
here, under the schemas of ``schemas``.

Rounding follows the golden model of CANN's open operators: ``w + offset`` and ``(...) * scale`` are
rounded to the dtype of x each, the product and the bias are summed in float32, the result is
rounded once. In the wide mode nothing is rounded, and x may be float32: what is left is what the
packed operands themselves lost.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from qcompile.backends.npu import emulator_experts, nibbles
from qcompile.backends.npu.contract import int4pack, quant_matmul, weight_quant
from qcompile.backends.npu.contract.quant_matmul import DynamicCall, QuantCall
from qcompile.backends.npu.contract.rules import is_turned
from qcompile.backends.npu.contract.weight_quant import WeightQuantCall
from qcompile.backends.npu.emulation import check, current, judged, unknown
from qcompile.backends.npu.schemas import SCHEMAS, VERSION

# **** operators, one function each ****


def weight_quant_batchmatmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    antiquant_scale: torch.Tensor,
    antiquant_offset: torch.Tensor | None = None,
    quant_scale: torch.Tensor | None = None,
    quant_offset: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    antiquant_group_size: int = 0,
    inner_precise: int = 0,
    weight_dtype: int | None = None,
) -> torch.Tensor:
    """``x @ ((weight + offset) * scale) + bias``; see ``contract.weight_quant``."""
    name = weight_quant.NAME
    mode = current(name)
    unknown(name, {"quant_scale": quant_scale, "quant_offset": quant_offset})
    unknown(name, {"inner_precise": inner_precise, "weight_dtype": weight_dtype})
    dtype = antiquant_scale.dtype
    seen = bias
    if bias is not None and mode.wide:
        wanted = torch.float32 if dtype == torch.bfloat16 else dtype
        seen = judged(bias, wanted, mode)
    call = WeightQuantCall(
        mode.arch,
        judged(x, dtype, mode),
        weight,
        antiquant_scale,
        antiquant_offset,
        seen,
        antiquant_group_size,
    )
    check(name, weight_quant.violated(call))
    y = x.float() @ _decoded(call, torch.float32 if mode.wide else x.dtype)
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype)


def _decoded(call: WeightQuantCall, dtype: torch.dtype) -> torch.Tensor:
    """The weight ``[K, N]`` as float32 numbers that ``dtype`` holds."""
    value = call.weight
    if value.dtype == torch.int32:
        value = nibbles.unpack(value.t()).t() if call.turned else nibbles.unpack(value)
    k = value.shape[0]

    def spread(part: torch.Tensor) -> torch.Tensor:
        rows = part.reshape(-1, part.shape[-1]).float()
        return rows.repeat_interleave(call.group, 0)[:k] if call.group else rows

    wide = value.float()
    if call.offset is not None:
        wide = (wide + spread(call.offset)).to(dtype).float()
    return (wide * spread(call.scale)).to(dtype).float()


def dynamic_quant(
    input: torch.Tensor,
    *,
    smooth_scales: torch.Tensor | None = None,
    group_index: torch.Tensor | None = None,
    dst_type: int | None = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes int8 and scales float32 ``[M]``: the largest of a token is 127 steps."""
    name = "npu_dynamic_quant"
    mode = current(name)
    unknown(name, {"smooth_scales": smooth_scales, "group_index": group_index})
    unknown(name, {"dst_type": dst_type, "dst_type_max": dst_type_max})
    check(name, None if quant_mode == "pertoken" else f"quant_mode {quant_mode}")
    dtype = input.dtype if input.dtype != torch.float32 else torch.float16
    check(name, quant_matmul.violated_dynamic(DynamicCall(mode.arch, judged(input, dtype, mode))))
    wide = input.float()
    scale = wide.abs().amax(-1) / 127.0
    steps = wide / scale.clamp_min(torch.finfo(torch.float32).tiny)[..., None]
    return steps.round().clamp(-128, 127).to(torch.int8), scale


def quantized_matmul(
    x1: torch.Tensor,
    x2: torch.Tensor,
    scale: torch.Tensor,
    *,
    offset: torch.Tensor | None = None,
    pertoken_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    output_dtype: int | None = None,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
    pertoken_scale_dtype: int | None = None,
    scale_dtype: int | None = None,
    group_sizes: list[int] | None = None,
    y_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """``(x1 @ x2) * scale * pertoken_scale[:, None] + bias``; see ``contract.quant_matmul``."""
    name = quant_matmul.NAME
    mode = current(name)
    unknown(name, {"offset": offset, "x1_dtype": x1_dtype, "x2_dtype": x2_dtype})
    unknown(name, {"pertoken_scale_dtype": pertoken_scale_dtype, "scale_dtype": scale_dtype})
    unknown(name, {"group_sizes": group_sizes, "y_scale": y_scale})
    output = None if output_dtype is None else _DTYPES.get(output_dtype)
    call = QuantCall(mode.arch, x1, x2, scale, pertoken_scale, bias, output)
    check(name, quant_matmul.violated(call))
    # Double holds every sum of products of two int8 exactly.
    sums = x1.double() @ x2.double()
    if bias is not None and bias.dtype == torch.int32:
        sums, bias = sums + bias, None
    y = sums.float() * scale.float()
    if pertoken_scale is not None:
        y = y * pertoken_scale[:, None]
    if bias is not None:
        y = y + bias.float()
    assert output is not None
    return y if mode.wide else y.to(output)


def convert_weight_to_int4pack(weight: torch.Tensor, inner_k_tiles: int = 0) -> torch.Tensor:
    """Eight values of the last dimension in an int32; see ``contract.int4pack``."""
    current(int4pack.NAME)
    check(int4pack.NAME, int4pack.violated(weight))
    return nibbles.pack(weight.to(torch.int8))


# The numbers of dtypes in the schemas.
_DTYPES = {5: torch.float16, 6: torch.float32, 15: torch.bfloat16, 1: torch.int8, 3: torch.int32}
OPERATORS: dict[str, Callable[..., Any]] = {
    int4pack.NAME: convert_weight_to_int4pack,
    "npu_dynamic_quant": dynamic_quant,
    quant_matmul.NAME: quantized_matmul,
    weight_quant.NAME: weight_quant_batchmatmul,
    **emulator_experts.OPERATORS,
}


# **** shapes, for tracing without the package ****


def _weight_quant_shape(x: torch.Tensor, weight: torch.Tensor, *rest: Any, **more: Any) -> Any:
    packed = weight.dtype == torch.int32 and not is_turned(weight)
    return x.new_empty((x.shape[0], weight.shape[1] * (nibbles.PER_WORD if packed else 1)))


def _dynamic_shape(input: torch.Tensor, **more: Any) -> Any:
    scale = input.new_empty(input.shape[:-1], dtype=torch.float32)
    return input.new_empty(input.shape, dtype=torch.int8), scale


def _quant_shape(x1: torch.Tensor, x2: torch.Tensor, scale: Any, **more: Any) -> Any:
    dtype = _DTYPES.get(more.get("output_dtype") or 1)
    return x1.new_empty((x1.shape[0], x2.shape[1]), dtype=dtype)


def _pack_shape(weight: torch.Tensor, inner_k_tiles: int = 0) -> Any:
    return weight.new_empty((*weight.shape[:-1], weight.shape[-1] // nibbles.PER_WORD))


_SHAPES: dict[str, Callable[..., Any]] = {
    int4pack.NAME: _pack_shape,
    "npu_dynamic_quant": _dynamic_shape,
    quant_matmul.NAME: _quant_shape,
    weight_quant.NAME: _weight_quant_shape,
    **emulator_experts.SHAPES,
}


# **** registration ****


@functools.cache
def define() -> tuple[torch.library.Library, ...]:
    """Register the operators for CPU tensors; define them first where the package is absent.

    Returns:
        the libraries, which have to be kept alive.
    """
    made = []
    if "torch_npu" not in sys.modules:
        definitions = torch.library.Library("npu", "DEF")
        for name, schema in SCHEMAS.items():
            definitions.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
            torch.library.register_fake(f"npu::{name}", _SHAPES[name], lib=definitions)
        made.append(definitions)
    kernels = torch.library.Library("npu", "IMPL")
    for name, function in OPERATORS.items():
        kernels.impl(name, function, "CPU")
    return (*made, kernels)


def describe(wide: bool) -> str:
    """What a plan says of an emulated graph."""
    how = "in float32 throughout" if wide else "with the device's rounding"
    return (
        f"emulated on the CPU, {how}: the operators of torch_npu {VERSION} as documented; "
        "the speed says nothing about a device"
    )
