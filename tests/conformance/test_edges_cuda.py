"""Every GGUF block on its way to the planar layout: what is kept, rounded, or has no way."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.gguf_blocks import finite_bytes

from qcompile import backends
from qcompile.backends.cuda.coding import coding_of
from qcompile.backends.cuda.layouts import DTYPES, layout_name
from qcompile.edge import Route, find_route
from qcompile.errors import LayoutError
from qcompile.layout import QuantizedTensor
from qcompile.schemes import scheme_of
from qcompile.schemes.gguf.blocks import SPECS
from qcompile.spec import AffineSpec, BlockSpec, FloatSpec, LookupSpec

backends.load("cuda").prepare()
scheme_of("gguf")
QUANTIZED = sorted(name for name, spec in SPECS.items() if not isinstance(spec, FloatSpec))
# Half a value of a group of 8 would be another weight's.
WITHOUT = {"iq1_m": "groups of 8 columns"}


def weight_of(name: str) -> QuantizedTensor:
    spec = SPECS[name]
    assert isinstance(spec, BlockSpec)
    data = finite_bytes(name, 40, 2)
    return QuantizedTensor(spec, f"gguf.{name}", (40, 2 * spec.elements), {"data": data})


def rounded(plain: QuantizedTensor, dtype: torch.dtype) -> QuantizedTensor:
    """Codes as they are, scales and offsets through a dtype."""
    assert isinstance(plain.spec, (AffineSpec, LookupSpec))
    parts = dict(plain.parts)
    for part in ("scale", "offset"):
        if part in parts:
            parts[part] = parts[part].to(dtype).float()
    spec = replace(plain.spec, scale=torch.float32)
    return QuantizedTensor(spec, plain.layout, plain.shape, parts)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", QUANTIZED)
def test_gguf_to_planes(name: str, dtype: torch.dtype) -> None:
    weight = weight_of(name)
    route = find_route(weight.layout, weight.spec, layout_name(dtype))
    assert route is not None
    coding = coding_of(route.spec, weight.shape[1])
    if name in WITHOUT:
        assert WITHOUT[name] in str(coding)
        return
    plain = Route(route.edges[:-1], route.spec).apply(weight)
    wide = max(
        float(plain.parts[p].float().abs().max()) for p in ("scale", "offset") if p in plain.parts
    )
    if wide > torch.finfo(dtype).max:
        with pytest.raises(LayoutError, match="run the model in bfloat16"):
            route.apply(weight)
        return
    packed = route.apply(weight)
    packed.check(name)
    assert torch.equal(packed.dequantize(), rounded(plain, dtype).dequantize())
    if route.error is None:
        assert torch.equal(packed.dequantize() + 0.0, weight.dequantize() + 0.0)
