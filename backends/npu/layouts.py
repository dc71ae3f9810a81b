"""The layouts that the vendor's matrix operators read.

Comes in: a spec and a shape ``[N, K]``. Goes out: operands in the operator's order.
Always holds: a value is ``(weight + offset) * scale``, the offset ADDED before the scale, and
``weight`` is the code minus ``2**(bits - 1)``; scale and offset have the dtype of the activations.

``npu.int4.nk.DTYPE``
    ``weight`` int32 ``[N, K / 8]``, see ``nibbles``; ``scale`` ``[N, G]``; where the spec has a
    zero or an offset ``offset`` ``[N, G]``. A product takes all of them transposed.
``npu.int4.kn.DTYPE``
    The same along the other dimension: ``[K, N / 8]`` and ``[G, N]``; taken as they lie.
``npu.int8.nk.DTYPE``, ``npu.int8.kn.DTYPE``
    ``weight`` int8 ``[N, K]`` or ``[K, N]``; the others as above. Lookup specs are stored here as
    the values of their table, which are integers of eight bits.
``npu.w8a8``
    ``weight`` int8 ``[N, K]``; ``scale`` float32 ``[N]``: for products with int8 activations.

For the order *permuted* all but the last have ``columns`` int32 ``[K]``: place i holds column
``columns[i]``, so that groups run in order; kernels gather the input.

The sign trap, with a zero point of 3: code 5 is stored as -3, the offset is 8 - 3 = 5.

>>> import torch
>>> spec = AffineSpec(bits=4, group=8, form="zero", scale=torch.float16)
>>> w = QuantizedTensor(spec, "npu.int4.nk.float16", (1, 8), {
...     "weight": torch.tensor([[-0x77777778 ^ 0x3333_3335]], dtype=torch.int32),
...     "scale": torch.tensor([[0.5]]).half(), "offset": torch.tensor([[5.0]]).half()})
>>> w.dequantize().tolist()
[[1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qcompile.backends.npu import nibbles
from qcompile.backends.npu.contract.rules import name_of
from qcompile.errors import LayoutError
from qcompile.layout import Field, Layout, QuantizedTensor, Shape, register_layout
from qcompile.spec import AffineSpec, LookupSpec, Spec

DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Order:
    """One way to lay out a weight.

    Attributes:
        bits: of a stored code: 4 or 8.
        rows_first: ``[N, K]``, which products take transposed; else ``[K, N]``.
        dtype: of scales and offsets, and of the activations.
    """

    bits: int
    rows_first: bool
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """The layout's name."""
        return f"npu.int{self.bits}.{'nk' if self.rows_first else 'kn'}.{name_of(self.dtype)}"


ORDERS = tuple(
    Order(bits, rows_first, dtype)
    for bits in (4, 8)
    for rows_first in (True, False)
    for dtype in DTYPES
)
W8A8 = "npu.w8a8"


def unfit(spec: Spec, bits: int) -> str | None:
    """Why codes of a spec cannot be stored with this many bits, or None when they can."""
    if isinstance(spec, LookupSpec):
        return None if bits == 8 else "values of a table need 8 bits"
    if not isinstance(spec, AffineSpec):
        return f"spec {spec} is neither affine nor a lookup"
    if spec.order == "indexed":
        return "groups of one size are needed; this weight's group index makes them uneven"
    return None if spec.bits <= bits else f"codes of {spec.bits} bits in {bits}"


def is_permuted(spec: Spec) -> bool:
    """Whether columns are stored in an order of their own."""
    return isinstance(spec, AffineSpec) and spec.order == "permuted"


def has_offset(spec: Spec) -> bool:
    """Whether the operator adds an offset to the codes."""
    return isinstance(spec, AffineSpec) and spec.form != "symmetric"


def _fields(order: Order, spec: Spec, shape: Shape) -> tuple[Field, ...]:
    reason = unfit(spec, order.bits)
    n, k = shape
    packed = k if order.rows_first else n
    if reason is None and order.bits == 4 and packed % nibbles.PER_WORD:
        reason = f"{packed} codes do not fill words of {nibbles.PER_WORD}"
    if reason is not None:
        raise LayoutError(f"layout {order.name}", reason, "a spec that fits", "choose another")
    assert isinstance(spec, (AffineSpec, LookupSpec))
    per_entry = nibbles.PER_WORD if order.bits == 4 else 1
    dtype = torch.int32 if order.bits == 4 else torch.int8
    groups = -(-k // spec.group)
    if order.rows_first:
        weight = Field("weight", dtype, (n, k // per_entry))
        vectors = [Field(name, order.dtype, (n, groups)) for name in ("scale", "offset")]
    else:
        weight = Field("weight", dtype, (k, n // per_entry), rows=per_entry, axis=1)
        vectors = [Field(name, order.dtype, (groups, n), axis=1) for name in ("scale", "offset")]
    fields = [weight, *vectors[: 2 if has_offset(spec) else 1]]
    if is_permuted(spec):
        fields.append(Field("columns", torch.int32, (k,), rows=0))
    return tuple(fields)


def values(weight: QuantizedTensor, order: Order) -> torch.Tensor:
    """The stored int8 values ``[N, K]``, in the stored order of columns."""
    stored = weight.parts["weight"]
    plain = nibbles.unpack(stored) if order.bits == 4 else stored
    return plain if order.rows_first else plain.t()


def _decode(order: Order, weight: QuantizedTensor) -> torch.Tensor:
    spec = weight.spec
    assert isinstance(spec, (AffineSpec, LookupSpec))
    columns = weight.shape[-1]

    def spread(name: str) -> torch.Tensor:
        part = weight.parts[name].float()
        rows = part if order.rows_first else part.t()
        return rows.repeat_interleave(min(spec.group, columns), dim=1)[:, :columns]

    plain = values(weight, order).float()
    if has_offset(spec):
        plain = plain + spread("offset")
    plain = plain * spread("scale")
    if not is_permuted(spec):
        return plain
    return torch.empty_like(plain).index_copy_(1, weight.parts["columns"].long(), plain)


def _layout(order: Order) -> Layout:
    return Layout(
        order.name,
        lambda spec, shape: _fields(order, spec, shape),
        lambda weight: _decode(order, weight),
    )


def _w8a8_fields(spec: Spec, shape: Shape) -> tuple[Field, ...]:
    n, k = shape
    fits = isinstance(spec, AffineSpec) and spec.form == "symmetric" and spec.group >= k
    if not fits or unfit(spec, 8):
        raise LayoutError(
            f"layout {W8A8}", f"spec {spec}", "symmetric codes, one scale a row", "choose another"
        )
    return Field("weight", torch.int8, (n, k)), Field("scale", torch.float32, (n,))


def _w8a8_decode(weight: QuantizedTensor) -> torch.Tensor:
    return weight.parts["weight"].float() * weight.parts["scale"][:, None]


LAYOUTS = {order.name: register_layout(_layout(order)) for order in ORDERS}
LAYOUTS[W8A8] = register_layout(Layout(W8A8, _w8a8_fields, _w8a8_decode))
