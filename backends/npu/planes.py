"""The layout of eight-bit matrices for products that take groups of four bits only.

Comes in: ``npu.int8.kn.DTYPE``. Goes out: ``npu.int4x2.kn.DTYPE``, every value as two of four bits.
Always holds: a value is ``16 * upper + lower``, exactly; the upper four bits of all columns come
before the lower four bits of all columns, each with scales of their own, and the input comes twice.

``weight`` is int32 ``[2 K, N / 8]``; ``scale`` and ``offset`` are ``[2 G, N]``: 16 times the scale
and 0 for the upper halves, the scale and 8 more than the offset for the lower ones, whose stored
values are from -8 to 7. ``columns`` is as in ``npu.int8.kn``.
"""

from __future__ import annotations

import torch

from qcompile.backends.npu import nibbles
from qcompile.backends.npu.edges import narrow
from qcompile.backends.npu.layouts import DTYPES, STEP, Order, is_permuted, unfit
from qcompile.edge import Edge, register_edge
from qcompile.errors import LayoutError
from qcompile.layout import Field, Layout, QuantizedTensor, Shape, register_layout
from qcompile.spec import AffineSpec, LookupSpec, Spec

_MIDDLE = STEP // 2
PLANES = {dtype: Order(8, False, dtype, halves=True) for dtype in DTYPES}
_WHOLE = {dtype: Order(8, False, dtype) for dtype in DTYPES}


def _fields(order: Order, spec: Spec, shape: Shape) -> tuple[Field, ...]:
    reason = unfit(spec, 8)
    n, k = shape
    if reason is None and n % nibbles.PER_WORD:
        reason = f"{n} values do not fill words of {nibbles.PER_WORD}"
    if reason is not None:
        raise LayoutError(f"layout {order.name}", reason, "a spec that fits", "choose another")
    assert isinstance(spec, (AffineSpec, LookupSpec))
    words = (2 * k, n // nibbles.PER_WORD)
    groups = 2 * -(-k // spec.group)
    fields = [
        Field("weight", torch.int32, words, rows=nibbles.PER_WORD, axis=1),
        *(Field(name, order.dtype, (groups, n), axis=1) for name in ("scale", "offset")),
    ]
    if is_permuted(spec):
        fields.append(Field("columns", torch.int32, (k,), rows=0))
    return tuple(fields)


def _decode(weight: QuantizedTensor) -> torch.Tensor:
    spec, k = weight.spec, weight.shape[1]
    assert isinstance(spec, (AffineSpec, LookupSpec))

    def spread(name: str) -> torch.Tensor:
        lower = weight.parts[name].float().chunk(2)[1]
        return lower.repeat_interleave(min(spec.group, k), dim=0)[:k]

    upper, lower = nibbles.unpack(weight.parts["weight"]).float().chunk(2)
    plain = ((STEP * upper + (lower + spread("offset"))) * spread("scale")).t()
    if not is_permuted(spec):
        return plain
    return torch.empty_like(plain).index_copy_(1, weight.parts["columns"].long(), plain)


def apply(weight: QuantizedTensor, order: Order) -> QuantizedTensor:
    """The halves of a weight of whole values."""
    stored, scale = weight.parts["weight"], weight.parts["scale"]
    offset = weight.parts.get("offset", torch.zeros_like(scale))
    upper, lower = stored >> 4, (stored & (STEP - 1)) - _MIDDLE
    parts = {
        "weight": nibbles.pack(torch.cat((upper, lower))),
        "scale": torch.cat((narrow(scale.float() * STEP, order), scale)),
        "offset": torch.cat((torch.zeros_like(offset), offset + _MIDDLE)),
    }
    if "columns" in weight.parts:
        parts["columns"] = weight.parts["columns"]
    return QuantizedTensor(weight.spec, order.name, weight.shape, parts)


def _target_spec(spec: Spec) -> Spec | None:
    return None if unfit(spec, 8) else spec


def _is_exact(spec: Spec) -> bool:
    return isinstance(spec, LookupSpec) or (isinstance(spec, AffineSpec) and spec.form != "offset")


def _edge(order: Order) -> Edge:
    return Edge(
        _WHOLE[order.dtype].name,
        order.name,
        _target_spec,
        lambda weight: apply(weight, order),
        error=f"float offsets are rounded to {order.dtype} once more",
        exact=_is_exact,
    )


def _layout(order: Order) -> Layout:
    return Layout(order.name, lambda spec, shape: _fields(order, spec, shape), _decode)


LAYOUTS = {order.name: register_layout(_layout(order)) for order in PLANES.values()}
EDGES = tuple(register_edge(_edge(order)) for order in PLANES.values())
