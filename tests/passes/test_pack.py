"""Weights are streamed through edges in runs of rows."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NoReturn

import pytest
import torch
from support.gguf_blocks import finite_bytes

from qcompile import backends
from qcompile.edge import Edge, Route, find_route
from qcompile.errors import LayoutError
from qcompile.layout import QuantizedTensor
from qcompile.passes.weights import pack as module
from qcompile.passes.weights.pack import pack
from qcompile.schemes import scheme_of
from qcompile.schemes.gguf.blocks import BLOCKS
from qcompile.weight import Rows, WeightRef

backends.load("cpu").prepare()
scheme_of("gguf")


@dataclass
class Stored:
    """A weight that counts how it is read."""

    whole: QuantizedTensor
    reads: list[Rows] = field(default_factory=list)
    releases: int = 0

    def read(self, rows: Rows) -> QuantizedTensor:
        self.reads.append(rows)
        return self.whole.take_rows(rows)

    def release(self) -> None:
        self.releases += 1

    @property
    def reference(self) -> WeightRef:
        whole = self.whole
        return WeightRef(
            "w", whole.spec, whole.layout, whole.shape, self.read, "file: w", self.release
        )


def stored(name: str, rows: int, blocks: int = 2) -> Stored:
    spec = BLOCKS[name].spec
    parts = {"data": finite_bytes(name, rows, blocks)}
    return Stored(QuantizedTensor(spec, f"gguf.{name}", (rows, blocks * spec.elements), parts))


def route_to(weight: QuantizedTensor, dest: str) -> Route:
    route = find_route(weight.layout, weight.spec, dest)
    assert route is not None
    return route


@pytest.mark.parametrize("dest", ["affine", "cpu.panel"])
@pytest.mark.parametrize("name", ["q4_0", "q5_1", "q8_0", "q4_k", "q6_k"])
@pytest.mark.parametrize("rows", [1, 16, 17, 50, 96])
def test_runs_equal_the_whole(
    monkeypatch: pytest.MonkeyPatch, name: str, dest: str, rows: int
) -> None:
    weight = stored(name, rows)
    columns = weight.whole.shape[1]
    monkeypatch.setattr(module, "_BYTES_IN_FLIGHT", 20 * columns)
    route = route_to(weight.whole, dest)
    packed = pack(weight.reference, route)
    whole = route.apply(weight.whole)
    assert packed.parts.keys() == whole.parts.keys()
    assert all(torch.equal(packed.parts[key], whole.parts[key]) for key in whole.parts)
    assert torch.equal(packed.dequantize() + 0.0, weight.whole.dequantize() + 0.0)
    slices = [run for run in weight.reads if isinstance(run, slice)]
    assert len(slices) == len(weight.reads) == weight.releases
    assert [i for run in slices for i in range(run.start, run.stop)] == list(range(rows))
    # 16 rows are a panel; as codes of one byte 20 rows are allowed in flight.
    assert all(run.stop - run.start <= (16 if dest == "cpu.panel" else 20) for run in slices)


def test_a_large_weight_is_never_whole_in_memory_nor_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(weight: QuantizedTensor) -> NoReturn:
        raise AssertionError("packing decoded a weight to floats")

    weight = stored("q8_0", 4096, 128)  # 16 Mi values
    monkeypatch.setattr(QuantizedTensor, "dequantize", refuse)
    pack(weight.reference, route_to(weight.whole, "cpu.panel"))
    runs = [run.stop - run.start for run in weight.reads if isinstance(run, slice)]
    assert sum(runs) == 4096
    assert max(runs) * 4096 <= module._BYTES_IN_FLIGHT


def test_without_edges_the_bytes_are_copied() -> None:
    weight = stored("q4_0", 8)
    packed = pack(weight.reference, Route((), weight.whole.spec))
    data = packed.parts["data"]
    assert torch.equal(data, weight.whole.parts["data"])
    assert data.untyped_storage().data_ptr() != (
        weight.whole.parts["data"].untyped_storage().data_ptr()
    )
    assert weight.releases == 1


def test_an_edge_that_can_fill_makes_nothing_of_its_own() -> None:
    weight = stored("q4_k", 50)
    route = route_to(weight.whole, "cpu.panel")
    [edge] = route.edges
    assert edge.fill is not None
    wanted = route.apply(weight.whole)

    def refuse(given: QuantizedTensor) -> NoReturn:
        raise AssertionError("the edge made a copy")

    packed = pack(weight.reference, Route((replace(edge, apply=refuse),), route.spec))
    assert all(torch.equal(packed.parts[key], wanted.parts[key]) for key in wanted.parts)


@pytest.mark.parametrize("fault", ["rows", "dtype"])
def test_an_edge_that_breaks_its_promise_is_named(fault: str) -> None:
    weight = stored("q8_0", 8)
    route = route_to(weight.whole, "affine")
    [edge] = route.edges

    def wrong(given: QuantizedTensor) -> QuantizedTensor:
        good = edge.apply(given)
        codes = good.parts["codes"]
        bad = codes[:-1] if fault == "rows" else codes.to(torch.int32)
        return replace(good, parts={**good.parts, "codes": bad})

    broken = Route((Edge(edge.source, edge.dest, edge.target_spec, wrong),), route.spec)
    with pytest.raises(LayoutError, match=r"file: w: an edge gave codes"):
        pack(weight.reference, broken)
