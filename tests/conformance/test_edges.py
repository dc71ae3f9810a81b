"""Every edge is exact, keeps rows, and makes what its layout declares."""

from __future__ import annotations

import pytest
import torch
from support.gguf_blocks import finite_bytes
from support.weights import random_weight

from qcompile import backends
from qcompile.backends.cpu.blocks import NESTED, PLAIN
from qcompile.backends.cpu.words import SOURCES
from qcompile.edge import edges, find_route
from qcompile.layout import QuantizedTensor, layout_of
from qcompile.schemes import scheme_of
from qcompile.schemes.gguf.blocks import SPECS
from qcompile.spec import AffineSpec, BlockSpec, FloatSpec, LookupSpec, Spec

backends.load("cpu").prepare()
scheme_of("gguf")
QUANTIZED = sorted(name for name, spec in SPECS.items() if not isinstance(spec, FloatSpec))


def weight_of(name: str, rows: int = 40) -> QuantizedTensor:
    """A weight of a GGUF type."""
    spec: Spec = SPECS[name]
    assert isinstance(spec, BlockSpec)
    data = finite_bytes(name, rows, 2)
    return QuantizedTensor(spec, f"gguf.{name}", (rows, 2 * spec.elements), {"data": data})


@pytest.mark.parametrize("name", QUANTIZED)
def test_gguf_to_panels(name: str) -> None:
    weight = weight_of(name)
    route = find_route(weight.layout, weight.spec, "cpu.panel")
    assert route is not None
    assert route.error is None
    packed = route.apply(weight)
    packed.check(name)
    assert packed.spec == route.spec
    assert torch.equal(packed.dequantize() + 0.0, weight.dequantize() + 0.0)
    run = route.apply(weight.take_rows(slice(16, 32)))
    assert torch.equal(run.parts["blob"], packed.parts["blob"][1:2])
    meta = layout_of("cpu.panel").empty(route.spec, weight.shape, device="meta")
    assert {k: (v.shape, v.dtype) for k, v in meta.items()} == {
        k: (v.shape, v.dtype) for k, v in packed.parts.items()
    }


@pytest.mark.parametrize("dest", ["cpu.fields", "cpu.aten_int4"])
@pytest.mark.parametrize("name", QUANTIZED)
def test_gguf_to_what_torch_multiplies(name: str, dest: str) -> None:
    weight = weight_of(name, rows=70)
    if name == "mxfp4":  # an exponent is the first byte of a block
        weight.parts["data"][:, ::17].clamp_(64, 192)
    route = find_route(weight.layout, weight.spec, dest)
    if route is None:  # groups of 8 columns
        assert (name, dest) == ("iq1_m", "cpu.aten_int4")
        return
    packed = route.apply(weight)
    packed.check(name)
    assert packed.spec == route.spec
    found, expected = packed.dequantize().double(), weight.dequantize().double()
    if route.error is None:
        assert torch.equal(found + 0.0, expected + 0.0)
    else:
        assert dest == "cpu.aten_int4"
        assert (found - expected).norm() <= 2**-8 * expected.norm()
    run = route.apply(weight.take_rows(slice(0, 64)))
    assert torch.equal(run.dequantize() + 0.0, packed.dequantize()[:64] + 0.0)
    meta = layout_of(dest).empty(route.spec, weight.shape, device="meta")
    assert {k: (v.shape, v.dtype) for k, v in meta.items()} == {
        k: (v.shape, v.dtype) for k, v in packed.parts.items()
    }


def test_every_edge_is_tried_here() -> None:
    """Those of the folder formats and of other backends have files of their own."""
    found = {e.source for e in edges() if e.dest == "cpu.panel"}
    direct = {f"gguf.{name}" for name in (*PLAIN, *NESTED)}
    assert found == {"affine", "lookup", "scaled", *direct, *(s.layout for s in SOURCES)}
    assert {e.source for e in edges() if e.dest == "cpu.fields"} == {"affine", "lookup", "scaled"}
    assert {e.source for e in edges() if e.dest == "cpu.aten_int4"} == {"affine", "lookup"}
    blocks = {e.source for e in edges() if e.source.startswith("gguf.")}
    assert blocks == {f"gguf.{name}" for name in QUANTIZED}


def test_an_edge_is_not_offered_where_it_does_not_fit() -> None:
    assert find_route("affine", AffineSpec(4, 32, "zero", order="indexed"), "cpu.panel") is None
    assert find_route("affine", FloatSpec(torch.float32), "cpu.panel") is None
    assert find_route("lookup", LookupSpec(5, 32, tuple(range(32))), "cpu.panel") is None
    assert find_route("cpu.panel", AffineSpec(4, 32, "zero"), "affine") is None


def test_wider_scales_are_exact() -> None:
    weight = random_weight(AffineSpec(4, 32, "zero", torch.bfloat16), 20, 64)
    route = find_route("affine", weight.spec, "cpu.panel")
    assert route is not None
    assert torch.equal(route.apply(weight).dequantize(), weight.dequantize())
