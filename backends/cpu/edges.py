"""Edges from the frame's layouts to ``cpu.panel``.

Comes in: a weight, or a run of its rows, in ``affine``, ``lookup`` or ``scaled``. Goes out: panels.
Always holds: the edges are exact; what panels cannot hold is refused before a byte moves, or with
an error that says which value does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from qcompile.backends.cpu.build import load_library
from qcompile.backends.cpu.panel import (
    NAME,
    OFFSET,
    ZERO,
    PanelSpec,
    arguments,
    form_of,
    is_permuted,
    unfit,
)
from qcompile.edge import Edge, register_edge
from qcompile.errors import LayoutError
from qcompile.layout import QuantizedTensor, layout_of
from qcompile.spec import LookupSpec, ScaledSpec, Spec

Parts = Mapping[str, torch.Tensor]


def panel_spec(spec: Spec) -> Spec | None:
    """The spec of panels that hold the same values, or None where there is none."""
    if isinstance(spec, PanelSpec) and spec.scale == torch.bfloat16:
        spec = replace(spec, scale=torch.float32)  # wider, hence exact
    return None if unfit(spec) else spec


def _pack(weight: QuantizedTensor) -> QuantizedTensor:
    spec = panel_spec(weight.spec)
    assert isinstance(spec, PanelSpec)
    load_library()
    codes = _float8_codes(weight) if isinstance(spec, ScaledSpec) else weight.parts["codes"]
    order = None
    if is_permuted(spec):
        order = torch.argsort(weight.parts["g_idx"], stable=True)
        codes = codes.index_select(1, order)
    blob = torch.ops.qcompile_cpu.panel_pack(
        codes.contiguous(),
        weight.parts["scale"].to(spec.scale).contiguous(),
        _extra(weight, spec),
        arguments(spec, weight.shape),
        min(spec.group, weight.shape[1]),
    )
    parts = {"blob": blob, "table": table_of(spec)}
    if order is not None:
        parts["columns"] = order.to(torch.int32)
    return QuantizedTensor(spec, NAME, weight.shape, parts)


def filled(
    weight: QuantizedTensor, spec: Spec, fill: Callable[[QuantizedTensor, Parts], None]
) -> QuantizedTensor:
    """New panels, which ``fill`` writes."""
    parts = layout_of(NAME).empty(spec, weight.shape)
    fill(weight, parts)
    return QuantizedTensor(spec, NAME, weight.shape, parts)


def table_of(spec: PanelSpec) -> torch.Tensor:
    """The values of a lookup spec, zeros otherwise."""
    table = torch.zeros(16, dtype=torch.int8)
    if isinstance(spec, LookupSpec):
        table[: len(spec.table)] = torch.tensor(spec.table, dtype=torch.int8)
    return table


def _extra(weight: QuantizedTensor, spec: PanelSpec) -> torch.Tensor | None:
    """Zeros as int32 or offsets as float32, where the form has them."""
    if form_of(spec) == OFFSET:
        return weight.parts["offset"].float().contiguous()
    if form_of(spec) != ZERO:
        return None
    zero = weight.parts["zero"].to(torch.int32).contiguous()
    if zero.numel() and int(zero.abs().max()) > torch.iinfo(torch.int16).max:
        raise LayoutError(
            f"layout {NAME}",
            f"a zero of {int(zero.abs().max())} in absolute value",
            "zeros of at most 32767",
            "write the checkpoint again",
        )
    return zero


def _float8_codes(weight: QuantizedTensor) -> torch.Tensor:
    """The bytes of narrow floats. Kernels know no NaN, which a weight should not have."""
    codes = weight.parts["data"].contiguous().view(torch.uint8)
    if bool(((codes & 0x7F) == 0x7F).any()):
        raise LayoutError(
            f"layout {NAME}", "a weight holds NaN", "numbers", "write the checkpoint again"
        )
    return codes


EDGES = tuple(
    register_edge(Edge(source, NAME, panel_spec, _pack))
    for source in ("affine", "lookup", "scaled")
)
