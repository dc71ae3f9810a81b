"""Edges to the layouts of Marlin kernels.

Comes in: a weight, or a run of its rows, in ``affine``. Goes out: the kernel's operands.
Always holds: codes and zero points never change their meaning; what is rounded is scales, and only
where the activations' dtype cannot hold them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn import functional

from qcompile.backends.cuda.marlin_layout import (
    ORDERS,
    Order,
    by_groups,
    by_rows,
    is_permuted,
    moved_by,
    pack_codes,
    pack_zeros,
    padded,
    unfit,
)
from qcompile.backends.rules import name_of
from qcompile.edge import Edge, register_edge
from qcompile.errors import LayoutError
from qcompile.layout import QuantizedTensor
from qcompile.spec import AffineSpec, Spec


def _target_spec(spec: Spec, order: Order) -> Spec | None:
    """The spec after an edge to this order."""
    if unfit(spec, order.bits):
        return None
    assert isinstance(spec, AffineSpec)
    return replace(spec, scale=order.dtype)


def loss(order: Order) -> str:
    """What an edge to this order loses where it is not exact."""
    unit = {torch.float16: "2**-11", torch.bfloat16: "2**-8"}[order.dtype]
    tail = ""
    if order.dtype == torch.float16:
        tail = " (where a scale is below 2**-14, by at most 2**-25 a step of the code)"
    return (
        f"scales are rounded to {name_of(order.dtype)}: "
        f"a value moves by at most {unit} of itself{tail}"
    )


def apply(weight: QuantizedTensor, order: Order) -> QuantizedTensor:
    """The operands of a weight in ``affine``."""
    spec = weight.spec
    assert isinstance(spec, AffineSpec)
    codes, (n, k) = weight.parts["codes"], weight.shape
    columns = None
    if is_permuted(spec):
        columns = torch.argsort(weight.parts["g_idx"], stable=True)
        codes = codes.index_select(1, columns)
    size = padded(spec, k)
    more = (0, size.columns - k, 0, size.rows(n) - n)
    stored = functional.pad(codes + moved_by(spec, order.bits), more)

    def tiled(part: torch.Tensor) -> torch.Tensor:
        return part.reshape(part.shape[0], size.rows(n) // size.tile, -1).contiguous()

    def lines(part: torch.Tensor) -> torch.Tensor:
        """``[G, N]`` with the padding of both."""
        return functional.pad(part.t(), (0, size.rows(n) - n, 0, size.groups - part.shape[1]))

    turned = by_groups if size.groups > 1 else by_rows
    parts = {
        "weight": tiled(pack_codes(stored, order.bits)),
        "scale": tiled(turned(lines(_narrow(weight.parts["scale"], order)))),
    }
    if spec.form == "zero":
        zeros = lines(_checked(weight.parts["zero"], order))
        parts["zero"] = tiled(pack_zeros(zeros, order.bits))
    if columns is not None:
        parts["columns"] = columns.to(torch.int32)
    target = _target_spec(spec, order)
    assert target is not None
    return QuantizedTensor(target, order.name, weight.shape, parts)


def _narrow(scale: torch.Tensor, order: Order) -> torch.Tensor:
    """Scales in the dtype of the activations; one that overflows is an error."""
    rounded = scale.to(order.dtype)
    if not bool((rounded.isfinite() | ~scale.isfinite()).all()):
        raise LayoutError(
            f"edge to {order.name}",
            f"a scale of {float(scale[scale.isfinite()].abs().max()):.3g}",
            f"numbers that {name_of(order.dtype)} can hold",
            "run the model in bfloat16",
        )
    return rounded


def _checked(zero: torch.Tensor, order: Order) -> torch.Tensor:
    """Zero points as codes; one that is no code is an error."""
    top = (1 << order.bits) - 1
    outside = (zero < 0) | (zero > top)
    if bool(outside.any()):
        raise LayoutError(
            f"edge to {order.name}",
            f"a zero point of {int(zero[outside].flatten()[0])}",
            f"zero points of 0 to {top}, which {order.bits} bits hold",
            "take the package that brings Marlin out of this environment; "
            "the Triton kernels take any zero point",
        )
    return zero.to(torch.uint8)


def _edge(order: Order) -> Edge:
    def is_exact(spec: Spec) -> bool:
        return isinstance(spec, AffineSpec) and spec.scale == order.dtype

    return Edge(
        "affine",
        order.name,
        lambda spec: _target_spec(spec, order),
        lambda weight: apply(weight, order),
        error=loss(order),
        exact=is_exact,
    )


EDGES = tuple(register_edge(_edge(order)) for order in ORDERS)
