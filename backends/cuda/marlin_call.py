"""The ops ``qcompile::marlin_linear`` and ``qcompile::marlin_product`` over an installed operator.

Comes in: activations and operands in a layout of ``marlin_layout``. Goes out: their product.
Always holds: which operator is called is found when the graph runs, by its schema, so a graph that
was saved may run where another package brings it; arguments go by their names, and a name that is
not known here is an error. Under tracing the ops are opaque.

The operators synchronise blocks through a workspace of zeros that they leave zeroed. It must not be
shared by streams that run at once: outside of CUDA graphs there is one for each stream, inside of a
capture each call has its own, which the graph zeroes whenever it is replayed.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from qcompile.backends.cuda import schemas
from qcompile.backends.cuda.installed import find, overload
from qcompile.backends.cuda.marlin_layout import by_rows
from qcompile.backends.cuda.schemas import Operator, type_id
from qcompile.errors import LowerError

_LOCKS_PER_PROCESSOR = 4  # blocks that share a multiprocessor, at most
_PROCESSORS = 256  # where the device does not say: more than any has
_ALIGNED = 16  # bytes

_library = torch.library.Library("qcompile", "FRAGMENT")
_library.define(
    "marlin_linear(Tensor x, Tensor weight, Tensor scale, Tensor? zero, Tensor? columns,"
    " Tensor? bias, int rows, int bits) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    columns: torch.Tensor | None,
    bias: torch.Tensor | None,
    rows: int,
    bits: int,
) -> torch.Tensor:
    """``x @ w.T + bias``.

    Args:
        x: ``[..., K]``.
        weight: see ``marlin_layout``; so are scale, zero and columns.
        scale: its dtype is that of x.
        zero: zero points, None for symmetric codes.
        columns: the order of columns, None for their own.
        bias: ``[N]`` or None.
        rows: N.
        bits: of a stored code.

    Returns:
        ``[..., N]`` in the dtype of x.
    """
    found = operator_for(schemas.LINEAR, x.dtype, scale.dtype, [(bits, zero is not None)])
    flat = x.reshape(-1, x.shape[-1])
    wide = flat.new_empty((0, scale.shape[1] * scale.shape[2]))
    if flat.shape[0]:
        values = operands(weight, scale, zero, bias if found.bias else None, bits)
        flat = prepared(flat, columns, weight.shape[0] * 16)
        values |= {"a": flat, "workspace": workspace(flat.device)}
        values |= {"size_m": flat.shape[0], "size_n": wide.shape[1], "size_k": flat.shape[1]}
        wide = overload(found)(*arguments(found, values))
    y = wide[:, :rows]
    if bias is not None and not found.bias:
        y = y + bias
    return y.reshape(*x.shape[:-1], rows).contiguous()


def _linear_shape(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    columns: torch.Tensor | None,
    bias: torch.Tensor | None,
    rows: int,
    bits: int,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], rows))


_library.impl("marlin_linear", linear, "CompositeExplicitAutograd")
torch.library.register_fake("qcompile::marlin_linear", _linear_shape, lib=_library)

marlin_linear = torch.ops.qcompile.marlin_linear.default


# **** what calls for one matrix and for several share ****


def operator_for(
    operators: Sequence[Operator],
    dtype: torch.dtype,
    packed: torch.dtype,
    kinds: Sequence[tuple[int, bool]],
) -> Operator:
    """The operator that this process has.

    Args:
        operators: in the order of preference.
        dtype: of the activations.
        packed: of the scales.
        kinds: bits of a stored code, and whether there are zero points, of every weight.

    Raises:
        LowerError: there is none, or the weights were packed for another dtype, which an operator
            would take for its own.
    """
    found: Operator | str = f"activations of {dtype}, scales of {packed}"
    if dtype == packed:
        found = find([o for o in operators if all(o.takes(dtype, *kind) for kind in kinds)])
    if isinstance(found, str):
        raise LowerError(
            "a graph with weights packed for Marlin",
            found,
            "the package and the dtype that the plan was made for",
            "install the package here too, or compile the model again on this machine",
        )
    return found


def operands(
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    bias: torch.Tensor | None,
    bits: int,
) -> dict[str, Any]:
    """Arguments that tell of weights; all dimensions but the last two are experts.

    Args:
        weight: ``[..., K / 16, N / T, T B / 2]``.
        scale: ``[..., G, N / T, T]``.
        zero: ``[..., G, N / T, T B / 32]`` or None.
        bias: ``[..., N]`` in the order of the weight's rows, not padded, or None.
        bits: of a stored code.
    """
    kind = type_id(bits, 1 << (bits - 1) if zero is None else 0)
    values: dict[str, Any] = {
        "b_q_weight": weight.flatten(-2),
        "b_scales": scale.flatten(-2),
        "b_zeros": None if zero is None else zero.flatten(-2),
        "b_bias": None,
        "b_type_id": kind,
        "b_q_type_id": kind,
    }
    if bias is not None:
        more = scale.shape[-1] * scale.shape[-2] - bias.shape[-1]
        wide = functional.pad(bias.to(scale.dtype), (0, more))
        values["b_bias"] = by_rows(wide).contiguous()
    return values


# What no call of ours leaves to the package. Sums are taken in float32 and in one order, so that a
# result does not change from run to run.
_FIXED: dict[str, Any] = {
    "c": None,
    "a_scales": None,
    "global_scale": None,
    "g_idx": None,
    "perm": None,
    "is_k_full": True,
    "use_atomic_add": False,
    "use_fp32_reduce": True,
    "is_zp_float": False,
    "c_tmp": None,
    "a_tmp": None,
    "thread_k": -1,
    "thread_n": -1,
    "blocks_per_sm": -1,
}


def arguments(operator: Operator, values: Mapping[str, Any]) -> list[Any]:
    """The arguments of a call in their order; packages differ in order and in endings of names."""
    known = {**_FIXED, **values}
    return [known[name] for name in _names(operator)]


@functools.cache
def _names(operator: Operator) -> tuple[str, ...]:
    schema = torch._C.parse_schema(operator.name + operator.schema)
    return tuple(one.name.removesuffix("_or_none") for one in schema.arguments)


def prepared(x: torch.Tensor, columns: torch.Tensor | None, wide: int) -> torch.Tensor:
    """``x [M, K]`` with its columns in order, padded with zeros, at an address for vectors."""
    if columns is not None:
        x = x.index_select(1, columns)
    if x.shape[1] < wide:
        x = functional.pad(x, (0, wide - x.shape[1]))
    x = x.contiguous()
    return x.clone() if x.data_ptr() % _ALIGNED else x


def workspace(device: torch.device) -> torch.Tensor:
    """Zeros for the locks of one call; see the module's text."""
    if device.type != "cuda":
        return _locks(device, 0)
    stream = torch.cuda.current_stream(device).cuda_stream
    if torch.cuda.is_current_stream_capturing():
        return _locks.__wrapped__(device, stream)
    return _locks(device, stream)


@functools.cache
def _locks(device: torch.device, stream: int) -> torch.Tensor:
    processors = _PROCESSORS
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    return torch.zeros(processors * _LOCKS_PER_PROCESSOR, dtype=torch.int32, device=device)
