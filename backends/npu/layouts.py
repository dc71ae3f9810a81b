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
``npu.int4x2.nk.DTYPE``
    For groups of 16 and of other sizes g that the operators take only when they are doubled: of
    each group first the upper four bits of its values, then the lower four bits, ``weight`` int32
    ``[N, 2 K / 8]``. A value is ``(upper + lower / 16 + offset) * scale``, its input stands for
    itself, then divided by 16. Codes of four bits and fewer are all upper, beside an input of 0.
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
        halves: whether the eight bits of a value are two times four.
    """

    bits: int
    rows_first: bool
    dtype: torch.dtype
    halves: bool = False

    @property
    def width(self) -> str:
        """What is stored for a value, as names and plans say it."""
        return "int4x2" if self.halves else f"int{self.bits}"

    @property
    def name(self) -> str:
        """The layout's name."""
        return f"npu.{self.width}.{'nk' if self.rows_first else 'kn'}.{name_of(self.dtype)}"

    @property
    def in_words(self) -> bool:
        """Whether eight stored values are in an int32."""
        return self.bits == 4 or self.halves


ORDERS = tuple(
    Order(bits, rows_first, dtype)
    for bits in (4, 8)
    for rows_first in (True, False)
    for dtype in DTYPES
)
HALVES = tuple(Order(8, True, dtype, halves=True) for dtype in DTYPES)
W8A8 = "npu.w8a8"
# Two times four bits hold values from -8 * 16 - 8 to 7 * 16 + 7.
STEP = 16
_LARGEST = 119


def unfit(spec: Spec, bits: int) -> str | None:
    """Why codes of a spec cannot be stored with this many bits, or None when they can."""
    if isinstance(spec, LookupSpec):
        return None if bits == 8 else "values of a table need 8 bits"
    if not isinstance(spec, AffineSpec):
        return f"spec {spec} is neither affine nor a lookup"
    if spec.order == "indexed":
        return "groups of one size are needed; this weight's group index makes them uneven"
    return None if spec.bits <= bits else f"codes of {spec.bits} bits in {bits}"


def unfit_halves(spec: Spec) -> str | None:
    """Why values of a spec cannot be stored as two times four bits, or None when they can."""
    reason = unfit(spec, 8)
    if reason is not None or is_narrow(spec):
        return reason
    if isinstance(spec, LookupSpec):
        return None if max(spec.table) <= _LARGEST else f"the table holds {max(spec.table)}"
    assert isinstance(spec, AffineSpec)
    if spec.form != "symmetric":
        # It would be added to both halves.
        return f"codes of {spec.bits} bits with an offset in two times 4"
    return None if spec.bits < 8 else "two times 4 bits end at 119; codes of 8 bits at 127"


def is_narrow(spec: Spec) -> bool:
    """Whether the values of a spec fit four bits."""
    return isinstance(spec, AffineSpec) and spec.bits <= 4


def is_permuted(spec: Spec) -> bool:
    """Whether columns are stored in an order of their own."""
    return isinstance(spec, AffineSpec) and spec.order == "permuted"


def has_offset(spec: Spec) -> bool:
    """Whether the operator adds an offset to the codes."""
    return isinstance(spec, AffineSpec) and spec.form != "symmetric"


def _fields(order: Order, spec: Spec, shape: Shape) -> tuple[Field, ...]:
    reason = unfit_halves(spec) if order.halves else unfit(spec, order.bits)
    n, k = shape
    packed = k if order.rows_first else n
    if order.halves:
        packed *= 2
    if reason is None and order.in_words and packed % nibbles.PER_WORD:
        reason = f"{packed} codes do not fill words of {nibbles.PER_WORD}"
    if reason is not None:
        raise LayoutError(f"layout {order.name}", reason, "a spec that fits", "choose another")
    assert isinstance(spec, (AffineSpec, LookupSpec))
    per_entry = nibbles.PER_WORD if order.in_words else 1
    dtype = torch.int32 if order.in_words else torch.int8
    groups = -(-k // spec.group)
    if order.rows_first:
        weight = Field("weight", dtype, (n, packed // per_entry))
        vectors = [Field(name, order.dtype, (n, groups)) for name in ("scale", "offset")]
    else:
        weight = Field("weight", dtype, (k, n // per_entry), rows=per_entry, axis=1)
        vectors = [Field(name, order.dtype, (groups, n), axis=1) for name in ("scale", "offset")]
    fields = [weight, *vectors[: 2 if has_offset(spec) else 1]]
    if is_permuted(spec):
        fields.append(Field("columns", torch.int32, (k,), rows=0))
    return tuple(fields)


def values(weight: QuantizedTensor, order: Order) -> torch.Tensor:
    """The stored values ``[N, K]``, in the stored order of columns; halves in units of the upper.

    Everything but halves is int8.
    """
    stored = weight.parts["weight"]
    plain = nibbles.unpack(stored) if order.in_words else stored
    if not order.halves:
        return plain if order.rows_first else plain.t()
    n, k = weight.shape
    upper, lower = plain.view(n, -1, 2, _group(weight.spec, k)).float().unbind(2)
    return (upper + lower / STEP).reshape(n, k)


def halved(stored: torch.Tensor, spec: Spec) -> torch.Tensor:
    """Values ``[N, K]`` as halves ``[N, 2 K]``; see ``npu.int4x2`` in the module's text."""
    n, k = stored.shape
    grouped = stored.view(n, -1, _group(spec, k))
    if is_narrow(spec):
        return torch.cat((grouped, torch.zeros_like(grouped)), -1).view(n, 2 * k)
    # Without a carry: the middle of four bits is taken for that of eight.
    wide = grouped.to(torch.int16)
    lower = ((wide + STEP // 2) & (STEP - 1)) - STEP // 2
    return torch.cat(((wide - lower) // STEP, lower), -1).to(torch.int8).view(n, 2 * k)


def _group(spec: Spec, columns: int) -> int:
    assert isinstance(spec, (AffineSpec, LookupSpec))
    return min(spec.group, columns)


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


LAYOUTS = {order.name: register_layout(_layout(order)) for order in (*ORDERS, *HALVES)}
LAYOUTS[W8A8] = register_layout(Layout(W8A8, _w8a8_fields, _w8a8_decode))
