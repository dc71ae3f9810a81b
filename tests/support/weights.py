"""Random weights of any spec, and sites around them."""

from __future__ import annotations

import torch

from qcompile.layout import QuantizedTensor
from qcompile.spec import AffineSpec, LookupSpec, ScaledSpec
from qcompile.weight import Rows, WeightRef


def random_weight(
    spec: AffineSpec | LookupSpec | ScaledSpec, n: int, k: int, seed: int = 0
) -> QuantizedTensor:
    """A weight in the layout ``affine``, ``lookup`` or ``scaled`` with scales of both signs."""
    generator = torch.Generator().manual_seed(seed)
    groups = -(-k // spec.group)
    if isinstance(spec, ScaledSpec):
        # Every value but the two that are no numbers, those below the normal ones too.
        codes = torch.randint(0, 254, (n, k), generator=generator)
        data = (codes + (codes >= 127)).to(torch.uint8).view(spec.dtype)
        scale = torch.randn(n, groups, generator=generator).to(spec.scale)
        return QuantizedTensor(spec, "scaled", (n, k), {"data": data, "scale": scale})
    entries = len(spec.table) if isinstance(spec, LookupSpec) else 1 << spec.bits
    parts = {
        "codes": torch.randint(0, entries, (n, k), generator=generator).to(torch.uint8),
        "scale": torch.randn(n, groups, generator=generator).to(spec.scale),
    }
    if isinstance(spec, LookupSpec):
        return QuantizedTensor(spec, "lookup", (n, k), parts)
    if spec.form == "zero":
        parts["zero"] = torch.randint(0, entries, (n, groups), generator=generator).to(torch.int32)
    if spec.form == "offset":
        parts["offset"] = torch.randn(n, groups, generator=generator)
    return QuantizedTensor(spec, "affine", (n, k), parts)


def reference(weight: QuantizedTensor, name: str = "proj.weight") -> WeightRef:
    """A weight in memory as a reference."""

    def read(rows: Rows) -> QuantizedTensor:
        return weight.take_rows(rows)

    return WeightRef(name, weight.spec, weight.layout, weight.shape, read, f"memory: {name}")
