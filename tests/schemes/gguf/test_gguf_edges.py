"""The edge of every block type keeps every value, bit for bit."""

from __future__ import annotations

import pytest
import torch
from support.gguf_blocks import finite_bytes, random_bytes

from qcompile.edge import Edge, find_route
from qcompile.layout import QuantizedTensor
from qcompile.schemes.gguf import edges as module
from qcompile.schemes.gguf.blocks import BLOCKS, SPECS
from qcompile.schemes.gguf.edges import EDGES
from qcompile.spec import AffineSpec, BlockSpec, LookupSpec

each_edge = pytest.mark.parametrize("edge", EDGES, ids=lambda edge: edge.source)


def weight_of(edge: Edge, data: torch.Tensor) -> QuantizedTensor:
    spec = BLOCKS[edge.source.removeprefix("gguf.")].spec
    columns = data.shape[-1] // spec.bytes * spec.elements
    return QuantizedTensor(spec, edge.source, (*data.shape[:-1], columns), {"data": data})


def assert_equal_values(found: torch.Tensor, wanted: torch.Tensor) -> None:
    # Adding 0.0 makes -0.0 and 0.0 the same bits.
    assert torch.equal((found + 0.0).view(torch.int32), (wanted + 0.0).view(torch.int32))


def name_of(edge: Edge) -> str:
    return edge.source.removeprefix("gguf.")


def test_every_type_has_one() -> None:
    assert [name_of(edge) for edge in EDGES] == list(BLOCKS)
    assert {spec.type for spec in SPECS.values() if isinstance(spec, BlockSpec)} == set(BLOCKS)


@each_edge
def test_values_are_equal(edge: Edge) -> None:
    weight = weight_of(edge, finite_bytes(name_of(edge), 64, 5))
    result = edge.apply(weight)
    result.check(edge.name)
    assert edge.error is None
    assert result.spec == edge.target_spec(weight.spec)
    assert result.layout == edge.dest
    assert_equal_values(result.dequantize(), weight.dequantize())


@each_edge
def test_every_byte_value_at_every_place(edge: Edge) -> None:
    size = BLOCKS[name_of(edge)].spec
    data = (torch.arange(size.bytes) * 7 + torch.arange(256)[:, None]).to(torch.uint8)
    weight = weight_of(edge, data)
    wanted = weight.dequantize()
    # Scales that are infinite or no number are the decoder's business, not the edge's.
    finite = wanted.isfinite().all(dim=1)
    assert finite.sum() > 150
    found = edge.apply(weight).dequantize()
    assert_equal_values(found[finite], wanted[finite])


@each_edge
def test_a_run_of_rows_is_the_rows_of_the_whole(
    edge: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = weight_of(edge, finite_bytes(name_of(edge), 12, 4))
    whole = edge.apply(weight)
    for rows in (slice(3, 7), slice(0, 0), torch.tensor([11, 0, 4])):
        part, wanted = edge.apply(weight.take_rows(rows)), whole.take_rows(rows)
        part.check(edge.name)
        for name, tensor in wanted.parts.items():
            assert torch.equal(part.parts[name], tensor), name
    monkeypatch.setattr(module, "_COLUMNS_AT_ONCE", 3 * BLOCKS[name_of(edge)].spec.elements)
    in_runs = edge.apply(weight)
    assert all(torch.equal(in_runs.parts[name], whole.parts[name]) for name in whole.parts)


@each_edge
def test_experts(edge: Edge) -> None:
    data = finite_bytes(name_of(edge), 6, 2)
    flat = edge.apply(weight_of(edge, data))
    stacked = edge.apply(weight_of(edge, data.view(2, 3, -1)))
    stacked.check(edge.name)
    for name, tensor in flat.parts.items():
        assert torch.equal(stacked.parts[name].flatten(0, 1), tensor)


@each_edge
def test_meta_run_has_the_shapes_of_the_real_one(edge: Edge) -> None:
    data = random_bytes(name_of(edge), 4, 2)
    real, meta = edge.apply(weight_of(edge, data)), edge.apply(weight_of(edge, data.to("meta")))
    assert {name: (part.shape, part.dtype) for name, part in real.parts.items()} == {
        name: (part.shape, part.dtype) for name, part in meta.parts.items()
    }
    assert all(part.is_meta for part in meta.parts.values())


@each_edge
def test_specs(edge: Edge) -> None:
    block = BLOCKS[name_of(edge)]
    other = SPECS["q4_0" if block.spec.type != "q4_0" else "q4_k"]
    assert edge.target_spec(other) is None
    assert edge.target_spec(SPECS["f32"]) is None
    bare = BlockSpec(block.spec.type, block.spec.elements, block.spec.bytes)
    assert edge.target_spec(bare) == block.exact
    route = find_route(edge.source, bare, edge.dest)
    assert route is not None
    assert (route.edges, route.spec, route.error) == ((edge,), block.exact, None)
    codes = edge.apply(weight_of(edge, random_bytes(block.spec.type, 64, 4))).parts["codes"]
    if isinstance(block.exact, LookupSpec):
        assert int(codes.max()) < len(block.exact.table) <= 1 << block.exact.bits
        assert all(-128 <= value <= 127 for value in block.exact.table)
    if isinstance(block.exact, AffineSpec):
        assert int(codes.max()) < 1 << block.exact.bits


def test_tables_survive_another_default_device() -> None:
    # A table built while a caller constructs a model on meta would be kept without values.
    for edge in EDGES:
        weight = weight_of(edge, finite_bytes(name_of(edge), 2, 2))
        with torch.device("meta"):
            result = edge.apply(weight)
        assert_equal_values(result.dequantize(), weight.dequantize())
