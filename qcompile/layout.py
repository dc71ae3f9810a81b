"""How the bytes of a weight lie.

Comes in: a spec and a shape. Goes out: named parts with a dtype and a shape each.
Always holds: a layout says enough to allocate its parts without looking at data, and every layout
that a checkpoint or a pass can produce has a decoder to float32.

Three layouts belong to no scheme and no device; schemes and backends register their own.

``affine``
    ``codes`` uint8 ``[N, K]``, one code a byte; ``scale`` ``[N, G]``; for the form *zero* also
    ``zero`` int32 ``[N, G]``, for the form *offset* also ``offset`` float32 ``[N, G]``; for the
    order *indexed* also ``g_idx`` int32 ``[K]``.

    >>> import torch
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

``float``
    ``data`` ``[N, K]`` of the spec's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from qcompile.errors import LayoutError
from qcompile.spec import AffineSpec, FloatSpec, LookupSpec, Spec

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Field:
    """One named tensor of a layout.

    Attributes:
        name: key in ``QuantizedTensor.parts``.
        dtype: dtype of the part.
        shape: shape of the part.
        rows: output rows of the weight that one entry along the part's first dimension holds; 0
            when the part does not belong to rows (a table, an index over columns).
    """

    name: str
    dtype: torch.dtype
    shape: Shape
    rows: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes of the whole part."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """A way to store weights of some specs.

    Attributes:
        name: key in the registry, for instance ``affine`` or ``gguf.q4_k``.
        fields: the parts of a weight of this spec and shape. Raises LayoutError when the spec or
            the shape cannot be stored this way.
        decode: float32 values of a weight in this layout, shape as the weight's.
    """

    name: str
    fields: Callable[[Spec, Shape], tuple[Field, ...]]
    decode: Callable[[QuantizedTensor], torch.Tensor]

    def nbytes(self, spec: Spec, shape: Shape) -> int:
        """Bytes of a weight of this spec and shape in this layout."""
        return sum(part.nbytes for part in self.fields(spec, shape))

    def empty(self, spec: Spec, shape: Shape, device: str = "cpu") -> dict[str, torch.Tensor]:
        """Parts with unset contents; on the meta device they describe a weight without bytes."""
        return {
            part.name: torch.empty(part.shape, dtype=part.dtype, device=device)
            for part in self.fields(spec, shape)
        }


@dataclass(frozen=True)
class QuantizedTensor:
    """A weight: what it means, how it lies, its shape and its parts.

    Attributes:
        spec: meaning of the parts.
        layout: name of a registered layout.
        shape: ``(N, K)``, or ``(E, N, K)`` for stacked experts.
        parts: the layout's fields by name.
    """

    spec: Spec
    layout: str
    shape: Shape
    parts: Mapping[str, torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts.values())

    def dequantize(self) -> torch.Tensor:
        """The weight as float32, shape ``self.shape``."""
        return layout_of(self.layout).decode(self)

    def take_rows(self, rows: slice | torch.Tensor) -> QuantizedTensor:
        """The weight restricted to some output rows, in the same layout.

        Args:
            rows: a slice (no bytes are copied) or an int64 index tensor.

        Raises:
            LayoutError: a part of this layout holds several rows in one entry.
        """
        fields = layout_of(self.layout).fields(self.spec, self.shape)
        parts: dict[str, torch.Tensor] = {}
        for part in fields:
            if part.rows > 1:
                raise LayoutError(
                    f"layout {self.layout}",
                    f"part {part.name!r} interleaves {part.rows} rows",
                    "a layout with one row in each entry",
                    "take the rows before the edge to this layout",
                )
            tensor = self.parts[part.name]
            parts[part.name] = tensor[rows] if part.rows == 1 else tensor
        count = len(range(*rows.indices(self.shape[0]))) if isinstance(rows, slice) else len(rows)
        return QuantizedTensor(self.spec, self.layout, (count, *self.shape[1:]), parts)

    def check(self, where: str) -> None:
        """Raise LayoutError unless the parts are exactly the layout's fields."""
        fields = layout_of(self.layout).fields(self.spec, self.shape)
        wanted = {part.name: (part.dtype, part.shape) for part in fields}
        found = {name: (part.dtype, tuple(part.shape)) for name, part in self.parts.items()}
        if wanted != found:
            raise LayoutError(
                where,
                f"parts {found}",
                f"{wanted} for layout {self.layout}, spec {self.spec}, shape {self.shape}",
                "report this: a scheme or an edge produced a wrong record",
            )


# **** registry ****

_LAYOUTS: dict[str, Layout] = {}


def register_layout(layout: Layout) -> Layout:
    """Make a layout known by its name. A second registration of the name is an error."""
    if layout.name in _LAYOUTS:
        raise LayoutError(
            f"layout {layout.name}", "registered twice", "one owner of a name", "rename one of them"
        )
    _LAYOUTS[layout.name] = layout
    return layout


def layout_of(name: str) -> Layout:
    """The registered layout of this name."""
    if name not in _LAYOUTS:
        raise LayoutError(
            f"layout {name}",
            "not registered",
            f"one of {', '.join(sorted(_LAYOUTS))}",
            "import the scheme or backend that owns it",
        )
    return _LAYOUTS[name]


# **** the three layouts of the frame ****


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
    if spec.order == "indexed":
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
    if spec.order == "indexed":
        return values[..., weight.parts["g_idx"].long()]
    return values.repeat_interleave(spec.group, dim=-1)[..., : weight.shape[-1]]


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
    scale = weight.parts["scale"].to(torch.float32).repeat_interleave(spec.group, dim=-1)
    return scale[..., : weight.shape[-1]] * table[weight.parts["codes"].long()]


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
FLOAT = register_layout(
    Layout("float", _float_fields, lambda weight: weight.parts["data"].to(torch.float32))
)
