"""How the bytes of a weight lie.

Comes in: a spec and a shape. Goes out: named parts with a dtype and a shape each.
Always holds: a layout says enough to allocate its parts without looking at data, and every layout
that a checkpoint or a pass can produce has a decoder to float32.

The layouts of the frame itself are in ``qcompile.frame_layouts``; schemes and backends register
their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from qcompile.errors import LayoutError
from qcompile.spec import Spec

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Field:
    """One named tensor of a layout.

    Attributes:
        name: key in ``QuantizedTensor.parts``.
        dtype: dtype of the part.
        shape: shape of the part.
        rows: output rows of the weight that one entry along ``axis`` holds; 0 when the part does
            not belong to rows (a table, an index over columns).
        axis: the dimension of the part along which the rows lie.
    """

    name: str
    dtype: torch.dtype
    shape: Shape
    rows: int = 1
    axis: int = 0

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

    def to(self, device: torch.device) -> QuantizedTensor:
        """The same weight with its parts on a device; itself when they are there."""
        if all(part.device == device for part in self.parts.values()):
            return self
        parts = {name: part.to(device) for name, part in self.parts.items()}
        return QuantizedTensor(self.spec, self.layout, self.shape, parts)

    def take_rows(self, rows: slice | torch.Tensor) -> QuantizedTensor:
        """The weight restricted to some output rows, in the same layout.

        Args:
            rows: a slice of step 1 (no bytes are copied) or an int64 index tensor.

        Raises:
            LayoutError: a part of this layout holds several rows in one entry, and ``rows`` is not
                a run of whole entries.
        """
        fields = layout_of(self.layout).fields(self.spec, self.shape)
        parts = {
            part.name: take_entries(part, self.parts[part.name], rows, self) for part in fields
        }
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


def take_entries(
    part: Field, tensor: torch.Tensor, rows: slice | torch.Tensor, weight: QuantizedTensor
) -> torch.Tensor:
    """The entries of one part that hold some rows of a weight. Raises as ``take_rows`` does."""
    if part.rows == 0:
        return tensor
    if not isinstance(rows, slice):
        if part.rows > 1:
            raise _interleaved(part, weight, "single rows")
        return tensor.index_select(part.axis, rows)
    count = weight.shape[0]
    start, stop, _ = rows.indices(count)
    if start % part.rows or (stop % part.rows and stop != count):
        raise _interleaved(part, weight, f"rows {start}..{stop}")
    first, last = start // part.rows, -(-stop // part.rows)
    return tensor.narrow(part.axis, first, max(0, last - first))


def _interleaved(part: Field, weight: QuantizedTensor, rows: str) -> LayoutError:
    return LayoutError(
        f"layout {weight.layout}",
        f"part {part.name!r} interleaves {part.rows} rows; {rows} were asked for",
        f"runs of rows that start and end at multiples of {part.rows}",
        "take the rows before the edge to this layout",
    )


# **** registry ****

_LAYOUTS: dict[str, Layout] = {}


def register_layout(layout: Layout) -> Layout:
    """Make a layout known by its name.

    Raises:
        LayoutError: the name is taken.
    """
    if layout.name in _LAYOUTS:
        raise LayoutError(
            f"layout {layout.name}", "registered twice", "one owner of a name", "rename one of them"
        )
    _LAYOUTS[layout.name] = layout
    return layout


def layout_of(name: str) -> Layout:
    """The registered layout of this name.

    Raises:
        LayoutError: there is none; the scheme or backend that owns it was not imported.
    """
    if name not in _LAYOUTS:
        raise LayoutError(
            f"layout {name}",
            "not registered",
            f"one of {', '.join(sorted(_LAYOUTS))}",
            "import the scheme or backend that owns it",
        )
    return _LAYOUTS[name]
