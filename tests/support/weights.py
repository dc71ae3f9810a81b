"""Random weights of any spec, and sites around them."""

from __future__ import annotations

import torch

from qcompile.layout import QuantizedTensor
from qcompile.spec import AffineSpec, LookupSpec
from qcompile.weight import Rows, WeightRef


def random_weight(spec: AffineSpec | LookupSpec, n: int, k: int, seed: int = 0) -> QuantizedTensor:
    """A weight in the ``affine`` or ``lookup`` layout with scales of both signs."""
    generator = torch.Generator().manual_seed(seed)
    groups = -(-k // spec.group)
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
