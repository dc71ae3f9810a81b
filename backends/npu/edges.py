"""Edges to the layouts of the vendor's operators.

Comes in: a weight, or a run of its rows, in ``affine`` or ``lookup``. Goes out: the operator's
operands. Always holds: codes never change, except in a group that is a constant; what is rounded
is scales and float offsets, and only where the activations' dtype cannot hold them.

The offset of the operator is ``2**(bits - 1) - zero`` for the form *zero* and
``2**(bits - 1) + offset / scale`` for the form *offset*. The second divides by the scale:

*A scale of 0* makes a group constant: every code means ``offset``. Such a group is stored with
the code 0, the operator's offset 1 and the scale ``offset``: ``(0 + 1) * offset``.
*A scale so small beside the offset* that the quotient overflows, or that rounding it would lose
more than the group's whole range, is treated the same way with the middle of the range.
*A scale below the normal numbers* of float16 loses digits; there the offset is computed for the
rounded scale, so that what is lost is a part of the range and never a part of the offset.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from qcompile.backends.npu import nibbles
from qcompile.backends.npu.layouts import (
    HALVES,
    ORDERS,
    STEP,
    W8A8,
    Order,
    halved,
    is_narrow,
    is_permuted,
    unfit,
    unfit_halves,
)
from qcompile.edge import Edge, register_edge
from qcompile.errors import LayoutError
from qcompile.layout import QuantizedTensor
from qcompile.spec import AffineSpec, LookupSpec, Spec

# Integers that the dtype holds without a gap.
_INTEGERS = {torch.float16: 2048, torch.bfloat16: 256}


def target_spec(spec: Spec, order: Order) -> Spec | None:
    """The spec after an edge to this order."""
    if unfit_halves(spec) if order.halves else unfit(spec, order.bits):
        return None
    assert isinstance(spec, (AffineSpec, LookupSpec))
    return replace(spec, scale=order.dtype)


def is_exact(spec: Spec, order: Order) -> bool:
    """Whether scales keep their dtype and offsets are integers."""
    if isinstance(spec, AffineSpec) and spec.form == "offset":
        return False
    return isinstance(spec, (AffineSpec, LookupSpec)) and spec.scale == order.dtype


def loss(order: Order) -> str:
    """What the edges to this order lose where they are not exact.

    With u the unit of rounding, ``(w + o)(1 + u) s (1 + u)`` is off by ``u |w + o| s`` for the
    scale and by ``u |o| s`` for the offset; both are values that the group can hold.
    """
    eps = {torch.float16: "2**-10", torch.bfloat16: "2**-7"}[order.dtype]
    name = str(order.dtype).removeprefix("torch.")
    tail = ""
    if order.dtype == torch.float16:
        tail = " (where a scale is below 2**-14, by at most 2**-25 a step of the code)"
    return (
        f"scales and float offsets are rounded to {name}: "
        f"a value moves by at most {eps} of the largest its group can hold{tail}"
    )


def apply(weight: QuantizedTensor, order: Order) -> QuantizedTensor:
    """The operands of a weight in ``affine`` or ``lookup``."""
    spec = weight.spec
    assert isinstance(spec, (AffineSpec, LookupSpec))
    if isinstance(spec, LookupSpec):
        table = torch.tensor(spec.table, dtype=torch.int8)
        stored = table[weight.parts["codes"].long()]
        vectors = {"scale": narrow(weight.parts["scale"], order)}
    else:
        stored = (weight.parts["codes"] - (1 << (spec.bits - 1))).view(torch.int8)
        stored, vectors = _vectors(weight, spec, stored, order)
    order_of_columns = None
    if is_permuted(spec):
        order_of_columns = torch.argsort(weight.parts["g_idx"], stable=True)
        stored = stored.index_select(1, order_of_columns)
    if order.halves:
        _check_groups(spec, weight.shape[1], order)
        stored = halved(stored, spec)
        if not is_narrow(spec):
            vectors["scale"] = narrow(weight.parts["scale"].float() * STEP, order)
    parts = laid_out(stored, vectors, order)
    if order_of_columns is not None:
        parts["columns"] = order_of_columns.to(torch.int32)
    target = target_spec(spec, order)
    assert target is not None
    return QuantizedTensor(target, order.name, weight.shape, parts)


def laid_out(
    stored: torch.Tensor, vectors: dict[str, torch.Tensor], order: Order
) -> dict[str, torch.Tensor]:
    """Stored values ``[N, K]`` and vectors ``[N, G]`` in an order's own shapes."""
    turned = stored if order.rows_first else stored.t()
    parts = {"weight": nibbles.pack(turned) if order.in_words else turned.contiguous()}
    for name, vector in vectors.items():
        parts[name] = (vector if order.rows_first else vector.t()).contiguous()
    return parts


# **** scales and offsets ****


def _vectors(
    weight: QuantizedTensor, spec: AffineSpec, stored: torch.Tensor, order: Order
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    if spec.form == "offset":
        return _offset_form(weight, spec, stored, order)
    vectors = {"scale": narrow(weight.parts["scale"], order)}
    if spec.form == "zero":
        vectors["offset"] = offset_of_zero(weight.parts["zero"], spec.bits, order)
    return stored, vectors


def offset_of_zero(zero: torch.Tensor, bits: int, order: Order) -> torch.Tensor:
    """What the operator adds to codes minus ``2**(bits - 1)``, for integer zero points."""
    offset = (1 << (bits - 1)) - zero.to(torch.int32)
    limit = _INTEGERS[order.dtype]
    if offset.numel() and int(offset.abs().max()) > limit:
        raise LayoutError(
            f"edge to {order.name}",
            f"a zero point of {int(zero.max())}",
            f"offsets up to {limit}, which {order.dtype} holds exactly",
            "keep the weight in its own layout",
        )
    return offset.to(order.dtype)


def narrow(scale: torch.Tensor, order: Order) -> torch.Tensor:
    """Scales in the dtype of the activations; one that overflows is an error."""
    rounded = scale.to(order.dtype)
    if not bool((rounded.isfinite() | ~scale.isfinite()).all()):
        raise LayoutError(
            f"edge to {order.name}",
            f"a value of {float(scale[scale.isfinite()].abs().max()):.3g} among the scales",
            f"numbers that {order.dtype} can hold",
            "run the model in bfloat16",
        )
    return rounded


def _offset_form(
    weight: QuantizedTensor, spec: AffineSpec, stored: torch.Tensor, order: Order
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """See the module's text for the groups that are constants."""
    scale, offset = weight.parts["scale"].float(), weight.parts["offset"]
    middle, top = 1 << (spec.bits - 1), (1 << spec.bits) - 1
    rounded = scale.to(order.dtype).float()
    unit = torch.finfo(order.dtype).eps / 2
    lossy = (rounded - scale).abs() > unit * scale.abs()
    shift = middle + offset / torch.where(lossy, rounded, scale)
    given = scale.isfinite() & offset.isfinite()
    # Beyond this, rounding the quotient costs more than half the range of the group.
    constant = given & ~(shift.abs() <= top / (2 * unit))
    _check_offsets(shift, given & ~constant, order)
    value = offset + scale * (top / 2)
    final = torch.where(constant, value, scale)
    shift = torch.where(constant, 1.0, shift)
    if bool(constant.any()):
        spread = constant.repeat_interleave(min(spec.group, stored.shape[1]), dim=1)
        if is_permuted(spec):
            spread = constant[:, weight.parts["g_idx"].long()]
        stored = stored.masked_fill(spread[:, : stored.shape[1]], 0)
    return stored, {"scale": narrow(final, order), "offset": shift.to(order.dtype)}


def _check_offsets(shift: torch.Tensor, used: torch.Tensor, order: Order) -> None:
    if bool((used & ~shift.to(order.dtype).isfinite()).any()):
        raise LayoutError(
            f"edge to {order.name}",
            f"an offset of {float(shift[used].abs().max()):.3g} steps of the code",
            f"offsets that {order.dtype} can hold",
            "run the model in bfloat16",
        )


def _check_groups(spec: AffineSpec | LookupSpec, columns: int, order: Order) -> None:
    if columns % min(spec.group, columns):
        raise LayoutError(
            f"edge to {order.name}",
            f"groups of {spec.group} in {columns} columns",
            "groups of one size",
            "choose another",
        )


# **** eight bits with eight bits ****


def _w8a8_spec(spec: Spec) -> Spec | None:
    if not isinstance(spec, AffineSpec) or spec.form != "symmetric" or spec.order != "sequential":
        return None
    return replace(spec, scale=torch.float32)


def _w8a8(weight: QuantizedTensor) -> QuantizedTensor:
    spec, target = weight.spec, _w8a8_spec(weight.spec)
    assert isinstance(spec, AffineSpec)
    assert target is not None
    scale = weight.parts["scale"].float()
    if scale.shape[1] != 1:
        raise LayoutError(f"edge to {W8A8}", f"{scale.shape[1]} groups", "one", "choose another")
    stored = (weight.parts["codes"] - (1 << (spec.bits - 1))).view(torch.int8).contiguous()
    parts = {"weight": stored, "scale": scale[:, 0].contiguous()}
    return QuantizedTensor(target, W8A8, weight.shape, parts)


def _edge(source: str, order: Order) -> Edge:
    return Edge(
        source,
        order.name,
        lambda spec: target_spec(spec, order),
        lambda weight: apply(weight, order),
        error=loss(order),
        exact=lambda spec: is_exact(spec, order),
    )


EDGES = (
    *(register_edge(_edge("affine", order)) for order in (*ORDERS, *HALVES)),
    *(register_edge(_edge("lookup", order)) for order in (*ORDERS, *HALVES) if order.bits == 8),
    register_edge(Edge("affine", W8A8, _w8a8_spec, _w8a8)),
)
