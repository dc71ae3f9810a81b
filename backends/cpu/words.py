"""Direct edges from words of packed codes: nothing is unpacked to one byte a code.

Comes in: a weight as GPTQ, AWQ or compressed-tensors store it, or a run of its rows. Goes out: the
same weight in ``cpu.panel``.
Always holds: the panels are those of the way over ``affine``, byte for byte.

Words of GPTQ and of compressed-tensors are streams along the columns; those of AWQ hold eight rows
of a column, except in its layout ``awq.gemv``. Columns permuted by a group index are put in order
where a row's words lie apart (GPTQ); rows of compressed-tensors take the way over ``affine``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qcompile.backends.cpu.build import load_library
from qcompile.backends.cpu.edges import Parts, filled, panel_spec, table_of
from qcompile.backends.cpu.panel import NAME, arguments, is_permuted
from qcompile.edge import Edge, register_edge
from qcompile.layout import QuantizedTensor
from qcompile.spec import AffineSpec, Spec

_ALONG_COLUMNS, _ALONG_ROWS = 0, 1


@dataclass(frozen=True)
class Source:
    """How a scheme stores words.

    Attributes:
        layout: the scheme's layout.
        words: the part with the words.
        scale: the part with the scales; the zero points are ``zeros``.
        rows_first: whether the first dimension of all these are the rows.
        packing: what a word holds.
    """

    layout: str
    words: str
    scale: str
    rows_first: bool
    packing: int = _ALONG_COLUMNS


SOURCES = (
    Source("gptq", "qweight", "scales", rows_first=False),
    Source("awq", "qweight", "scales", rows_first=False, packing=_ALONG_ROWS),
    Source("awq.gemv", "qweight", "scales", rows_first=True),
    Source("ct.packed", "packed", "scale", rows_first=True),
)


def _target(spec: Spec, source: Source) -> AffineSpec | None:
    target = panel_spec(spec)
    if not isinstance(target, AffineSpec) or target.form == "offset":
        return None
    return None if is_permuted(target) and source.layout != "gptq" else target


def _fill(weight: QuantizedTensor, parts: Parts, source: Source) -> None:
    spec = _target(weight.spec, source)
    assert spec is not None
    load_library()
    if is_permuted(spec):
        parts["columns"].copy_(torch.argsort(weight.parts["g_idx"], stable=True))
    words = weight.parts[source.words]
    row, along = words.stride() if source.rows_first else words.stride()[::-1]
    zero = None
    if spec.form == "zero":
        zero = _rows_first(weight.parts["zeros"], source).to(torch.int32)
    torch.ops.qcompile_cpu.panel_from_words(
        words,
        _rows_first(weight.parts[source.scale], source).to(spec.scale),
        zero,
        parts.get("columns"),
        arguments(spec, weight.shape),
        min(spec.group, weight.shape[1]),
        [row, along],
        source.packing,
        parts["blob"],
    )
    parts["table"].copy_(table_of(spec))


def _rows_first(part: torch.Tensor, source: Source) -> torch.Tensor:
    return (part if source.rows_first else part.t()).contiguous()


def _edge(source: Source) -> Edge:
    def fill(weight: QuantizedTensor, parts: Parts) -> None:
        _fill(weight, parts, source)

    def apply(weight: QuantizedTensor) -> QuantizedTensor:
        spec = _target(weight.spec, source)
        assert spec is not None
        return filled(weight, spec, fill)

    return Edge(source.layout, NAME, lambda spec: _target(spec, source), apply, fill=fill)


EDGES = tuple(register_edge(_edge(source)) for source in SOURCES)
