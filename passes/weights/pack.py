"""Send a stored weight through its plan's edges, a run of rows at a time.

Before: rows of ``gguf.q4_k``. After: the same weight in ``cpu.panel``, say.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from qcompile.edge import Route
from qcompile.layout import Field, QuantizedTensor, layout_of
from qcompile.memory import Slabs
from qcompile.weight import WeightRef

# A run of rows is decoded to one byte a weight on its way; this bounds that intermediate.
_BYTES_IN_FLIGHT = 8 << 20
_SLABS = Slabs()


def pack(weight: WeightRef, route: Route) -> QuantizedTensor:
    """The weight in the layout at the end of the route.

    Args:
        weight: a stored weight ``[N, K]``; only the rows of one run are read at a time.
        route: edges from the weight's layout, perhaps none.

    Raises:
        LayoutError: an edge produced something else than its layout declares.
    """
    if not route.edges:
        whole = _own(weight.load())
        weight.release()
        return whole
    dest = layout_of(route.edges[-1].dest)
    fields = dest.fields(route.spec, weight.shape)
    parts = {part.name: _SLABS.empty(part.shape, part.dtype) for part in fields}
    stored = layout_of(weight.layout).fields(weight.spec, weight.shape)
    for rows in _runs(weight, (*stored, *fields)):
        route.fill(weight.read(rows), _rooms(parts, fields, rows), weight.source)
        weight.release()
    packed = QuantizedTensor(route.spec, dest.name, weight.shape, parts)
    packed.check(weight.source)
    return packed


def _own(weight: QuantizedTensor) -> QuantizedTensor:
    """Copy parts that may be views of a file, which must not outlive it."""
    parts = {name: part.clone() for name, part in weight.parts.items()}
    return QuantizedTensor(weight.spec, weight.layout, weight.shape, parts)


def _runs(weight: WeightRef, fields: tuple[Field, ...]) -> Iterator[slice]:
    count = weight.shape[0]
    step = math.lcm(*(part.rows for part in fields if part.rows), 1)
    run = max(step, _BYTES_IN_FLIGHT // math.prod(weight.shape[1:]) // step * step)
    for start in range(0, count, run):
        yield slice(start, min(start + run, count))


def _rooms(
    parts: dict[str, torch.Tensor], fields: tuple[Field, ...], rows: slice
) -> dict[str, torch.Tensor]:
    """Where a run's parts belong; all of a part that has no rows."""
    rooms = {}
    for part in fields:
        rooms[part.name] = parts[part.name]
        if part.rows:
            first, last = rows.start // part.rows, -(-rows.stop // part.rows)
            rooms[part.name] = parts[part.name].narrow(part.axis, first, last - first)
    return rooms
