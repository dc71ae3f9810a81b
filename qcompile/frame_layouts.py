"""The layouts that belong to no scheme and no device.

Comes in: a spec and a shape, or a weight in one of these layouts. Goes out: its parts' shapes, or
its float32 values.
Always holds: the decoders here are the formulas of ``qcompile.spec``, term by term.

``affine``
    ``codes`` uint8 ``[N, K]``, one code a byte; ``scale`` ``[N, G]``; for the form *zero* also
    ``zero`` int32 ``[N, G]``, for the form *offset* also ``offset`` float32 ``[N, G]``; for the
    orders *permuted* and *indexed* also ``g_idx`` int32 ``[K]``, the group of every column.

    >>> import torch
    >>> from qcompile.layout import QuantizedTensor
    >>> from qcompile.spec import AffineSpec
    >>> spec = AffineSpec(bits=4, group=4, form="offset")
    >>> w = QuantizedTensor(spec, "affine", (1, 8), {
    ...     "codes": torch.tensor([[0, 1, 2, 15, 0, 1, 2, 15]], dtype=torch.uint8),
    ...     "scale": torch.tensor([[0.5, 1.0]]), "offset": torch.tensor([[-1.0, 0.0]])})
    >>> w.dequantize().tolist()
    [[-1.0, -0.5, 0.0, 6.5, 0.0, 1.0, 2.0, 15.0]]

``lookup``
    ``codes`` uint8 ``[N, K]``; ``scale`` ``[N, G]``. The table is in the spec.

    >>> from qcompile.spec import LookupSpec
    >>> spec = LookupSpec(bits=2, group=8, table=(-4, -1, 1, 4))
    >>> w = QuantizedTensor(spec, "lookup", (1, 8), {
    ...     "codes": torch.tensor([[0, 1, 2, 3, 3, 2, 1, 0]], dtype=torch.uint8),
    ...     "scale": torch.tensor([[0.25]])})
    >>> w.dequantize().tolist()
    [[-1.0, -0.25, 0.25, 1.0, 1.0, 0.25, -0.25, -1.0]]

``scaled``
    ``data`` ``[N, K]`` of the spec's dtype; ``scale`` ``[N, G]``.

``float``
    ``data`` ``[N, K]`` of the spec's dtype.
"""

from __future__ import annotations

import torch

from qcompile.errors import LayoutError
from qcompile.layout import Field, Layout, QuantizedTensor, Shape, register_layout
from qcompile.spec import AffineSpec, FloatSpec, LookupSpec, ScaledSpec, Spec


def _affine_fields(spec: Spec, shape: Shape) -> tuple[Field, ...]:
    if not isinstance(spec, AffineSpec):
        raise _wrong_spec("affine", spec, "an affine spec")
    *lead, n, k = shape
    groups = -(-k // spec.group)
    fields = [
        Field("codes", torch.uint8, (*lead, n, k)),
        Field("scale", spec.scale, (*lead, n, groups)),
    ]
    if spec.form == "zero":
        fields.append(Field("zero", torch.int32, (*lead, n, groups)))
    if spec.form == "offset":
        fields.append(Field("offset", torch.float32, (*lead, n, groups)))
    if spec.order != "sequential":
        fields.append(Field("g_idx", torch.int32, (k,), rows=0))
    return tuple(fields)


def _affine_decode(weight: QuantizedTensor) -> torch.Tensor:
    spec = weight.spec
    assert isinstance(spec, AffineSpec)
    codes = weight.parts["codes"].to(torch.float32)
    scale = _per_column(weight.parts["scale"].to(torch.float32), weight, spec)
    if spec.form == "offset":
        return scale * codes + _per_column(weight.parts["offset"], weight, spec)
    if spec.form == "zero":
        return scale * (codes - _per_column(weight.parts["zero"].to(torch.float32), weight, spec))
    return scale * (codes - 2.0 ** (spec.bits - 1))


def _per_column(values: torch.Tensor, weight: QuantizedTensor, spec: AffineSpec) -> torch.Tensor:
    if spec.order != "sequential":
        return values[..., weight.parts["g_idx"].long()]
    return _spread(values, spec.group, weight.shape[-1])


def _spread(values: torch.Tensor, group: int, columns: int) -> torch.Tensor:
    """Values of groups, once for every column."""
    return values.repeat_interleave(group, dim=-1)[..., :columns]


def _lookup_fields(spec: Spec, shape: Shape) -> tuple[Field, ...]:
    if not isinstance(spec, LookupSpec):
        raise _wrong_spec("lookup", spec, "a lookup spec")
    *lead, n, k = shape
    return (
        Field("codes", torch.uint8, (*lead, n, k)),
        Field("scale", spec.scale, (*lead, n, -(-k // spec.group))),
    )


def _lookup_decode(weight: QuantizedTensor) -> torch.Tensor:
    spec = weight.spec
    assert isinstance(spec, LookupSpec)
    table = torch.tensor(spec.table, dtype=torch.float32)
    scale = _spread(weight.parts["scale"].to(torch.float32), spec.group, weight.shape[-1])
    return scale * table[weight.parts["codes"].long()]


def _scaled_fields(spec: Spec, shape: Shape) -> tuple[Field, ...]:
    if not isinstance(spec, ScaledSpec):
        raise _wrong_spec("scaled", spec, "a scaled spec")
    *lead, n, k = shape
    return (
        Field("data", spec.dtype, (*lead, n, k)),
        Field("scale", spec.scale, (*lead, n, -(-k // spec.group))),
    )


def _scaled_decode(weight: QuantizedTensor) -> torch.Tensor:
    spec = weight.spec
    assert isinstance(spec, ScaledSpec)
    scale = _spread(weight.parts["scale"].to(torch.float32), spec.group, weight.shape[-1])
    return scale * weight.parts["data"].to(torch.float32)


def _float_fields(spec: Spec, shape: Shape) -> tuple[Field, ...]:
    if not isinstance(spec, FloatSpec):
        raise _wrong_spec("float", spec, "a float spec")
    return (Field("data", spec.dtype, shape),)


def _wrong_spec(layout: str, spec: Spec, wanted: str) -> LayoutError:
    return LayoutError(
        f"layout {layout}", f"spec {spec}", wanted, "take an edge to a layout that fits this spec"
    )


AFFINE = register_layout(Layout("affine", _affine_fields, _affine_decode))
LOOKUP = register_layout(Layout("lookup", _lookup_fields, _lookup_decode))
SCALED = register_layout(Layout("scaled", _scaled_fields, _scaled_decode))
FLOAT = register_layout(
    Layout("float", _float_fields, lambda weight: weight.parts["data"].to(torch.float32))
)
