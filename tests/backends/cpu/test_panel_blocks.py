"""Panels straight from GGUF's blocks have the values of gguf-py, whatever scales and shape."""

from __future__ import annotations

import gguf as oracle
import numpy as np
import pytest
import torch
from support.gguf_blocks import finite_bytes, random_bytes

from qcompile import backends
from qcompile.backends.cpu.blocks import NESTED, PLAIN
from qcompile.backends.cpu.panel import NAME, arguments
from qcompile.edge import Edge, edges, find_route
from qcompile.experts_layout import role_weight
from qcompile.layout import QuantizedTensor
from qcompile.schemes import scheme_of
from qcompile.schemes.gguf.blocks import BLOCKS
from qcompile.spec import AffineSpec, BlockSpec, ExpertsSpec, RoleSpec

backends.load("cpu").prepare()
scheme_of("gguf")
NAMES = (*PLAIN, *NESTED)


def weight_of(name: str, data: torch.Tensor) -> QuantizedTensor:
    spec = BLOCKS[name].spec
    shape = (len(data), data.shape[1] // spec.bytes * spec.elements)
    return QuantizedTensor(spec, f"gguf.{name}", shape, {"data": data})


def packed(weight: QuantizedTensor) -> QuantizedTensor:
    route = find_route(weight.layout, weight.spec, NAME)
    assert route is not None
    assert len(route.edges) == 1
    assert route.error is None
    found = route.apply(weight)
    found.check("here")
    return found


def direct(name: str) -> Edge:
    """The edge to panels."""
    [edge] = [e for e in edges() if e.source == f"gguf.{name}" and e.dest == NAME]
    return edge


def over(name: str) -> Edge:
    """The edge over one byte a code."""
    [edge] = [e for e in edges() if e.source == f"gguf.{name}" and e.dest in ("affine", "lookup")]
    return edge


def assert_same(found: torch.Tensor, wanted: np.ndarray) -> None:
    """Bit for bit, but for which zero and which NaN."""
    assert found.shape == wanted.shape
    wanted = wanted + np.float32(0)
    numbers = ~np.isnan(wanted)
    bits = (found + 0.0).numpy()
    assert np.array_equal(~np.isnan(bits), numbers)
    assert np.array_equal(bits[numbers].view(np.int32), wanted[numbers].view(np.int32))


def looked_up(weight: QuantizedTensor) -> torch.Tensor:
    """All rows, as the native code decodes them."""
    ids, shape = torch.arange(weight.shape[0]), arguments(weight.spec, weight.shape)
    found: torch.Tensor = torch.ops.qcompile_cpu.panel_embedding(
        ids, weight.parts["blob"], weight.parts["table"], shape, torch.float32
    )
    return found


@pytest.mark.parametrize("rows", [1, 7, 16, 48, 50])
@pytest.mark.parametrize("blocks", [1, 3, 9])
@pytest.mark.parametrize("name", NAMES)
def test_values_are_those_of_gguf(name: str, blocks: int, rows: int) -> None:
    """One block, chunks that are not full, panels that are not full; infinite and NaN scales."""
    for data in (random_bytes(name, rows, blocks), finite_bytes(name, rows, blocks, seed=1)):
        with np.errstate(all="ignore"):
            kind = oracle.GGMLQuantizationType[name.upper()]
            wanted = np.asarray(oracle.quants.dequantize(data.numpy(), kind))
        found = packed(weight_of(name, data))
        assert_same(found.dequantize(), wanted)
        assert_same(looked_up(found), wanted)


@pytest.mark.parametrize("name", NAMES)
def test_every_byte_of_a_block_counts(name: str) -> None:
    """A block, and the same with any one of its bits flipped."""
    size = BLOCKS[name].spec.bytes
    data = finite_bytes(name, 1, 1, seed=2).repeat(1 + 8 * size, 1)
    for bit in range(8 * size):
        data[1 + bit, bit // 8] ^= 1 << bit % 8
    kind = oracle.GGMLQuantizationType[name.upper()]
    with np.errstate(all="ignore"):
        wanted = np.asarray(oracle.quants.dequantize(data.numpy(), kind))
    assert_same(packed(weight_of(name, data)).dequantize(), wanted)


@pytest.mark.parametrize("rows", [5, 32, 40])
@pytest.mark.parametrize("name", PLAIN)
def test_plain_panels_are_those_of_the_way_over_codes(name: str, rows: int) -> None:
    weight = weight_of(name, finite_bytes(name, rows, 9))
    found, codes = packed(weight), over(name).apply(weight)
    other = packed(codes)
    assert found.spec == other.spec
    for part, value in other.parts.items():
        assert torch.equal(found.parts[part], value), part


@pytest.mark.parametrize("name", NESTED)
def test_nested_panels_are_smaller_and_say_so(name: str) -> None:
    weight = weight_of(name, finite_bytes(name, 33, 2))
    found, other = packed(weight), packed(over(name).apply(weight))
    assert found.spec != other.spec
    assert "nested 256" in str(found.spec)
    assert found.nbytes < other.nbytes
    missing = found.parts["blob"][2].clone()
    alone = packed(weight_of(name, weight.parts["data"][32:])).parts["blob"][0]
    assert torch.equal(missing, alone)
    products = torch.ops.qcompile_cpu.panel_linear(
        torch.eye(512), found.parts["blob"], found.parts["table"], None,
        arguments(found.spec, found.shape), 0,
    ).t()  # fmt: skip
    wanted = weight.dequantize()
    assert torch.allclose(products, wanted, rtol=0, atol=2e-6 * float(wanted.abs().max()))


def test_experts_take_the_direct_edges_role_by_role() -> None:
    shapes = (("gate_up", "q4_k", 96, 256), ("down", "q6_k", 256, 256))
    roles = tuple(
        RoleSpec(role, BLOCKS[name].spec, f"gguf.{name}", rows, columns)  # type: ignore[arg-type]
        for role, name, rows, columns in shapes
    )
    parts = {
        f"{role}.data": torch.stack([finite_bytes(name, rows, 1, seed=e) for e in range(3)])
        for role, name, rows, _ in shapes
    }
    weight = QuantizedTensor(ExpertsSpec(roles), "experts", (3, 352, 256), parts)
    weight.check("here")
    route = find_route("experts", weight.spec, "cpu.panel_experts")
    assert route is not None
    found = route.apply(weight)
    found.check("here")
    assert isinstance(found.spec, ExpertsSpec)
    for role, after in zip(roles, found.spec.roles, strict=True):
        assert isinstance(after.spec, AffineSpec)
        assert after.spec.nested == 256
        for expert in range(3):
            wanted = packed(role_weight(weight, role, expert)).parts["blob"]
            assert torch.equal(role_weight(found, after, expert).parts["blob"], wanted)


def test_rows_that_lie_apart() -> None:
    data = finite_bytes("q4_k", 40, 3)
    wanted = packed(weight_of("q4_k", data)).parts["blob"]
    apart = torch.empty(40, data.shape[1] + 5, dtype=torch.uint8)
    apart[:, : data.shape[1]] = data
    found = packed(weight_of("q4_k", apart[:, : data.shape[1]]))
    assert torch.equal(found.parts["blob"], wanted)


def test_no_rows() -> None:
    for name in NAMES:
        found = packed(weight_of(name, random_bytes(name, 1, 1)[:0]))
        assert found.dequantize().shape == (0, BLOCKS[name].spec.elements)


def test_what_is_refused() -> None:
    call = torch.ops.qcompile_cpu.panel_from_blocks
    data, spec = finite_bytes("q4_k", 16, 1), AffineSpec(4, 32, "offset", nested=256)
    shape, blob = arguments(spec, (16, 256)), packed(weight_of("q4_k", data)).parts["blob"]
    for name, given, numbers, why in (
        ("q9_k", data, shape, "no way from blocks of q9_k"),
        ("q5_k", data, shape, "another spec"),
        ("q4_k", data, [*shape[:5], 0], "another spec"),
        ("q4_k", data[:15], shape, "not rows of whole blocks"),
        ("q4_k", data, [16, 128, *shape[2:]], "not rows of whole blocks"),
    ):
        with pytest.raises(RuntimeError, match=why):
            call(given, name, numbers, blob)
    for other in (blob[:, 1:], blob[:0], blob.view(torch.int8)):
        with pytest.raises(RuntimeError, match="bytes of its shape"):
            call(data, "q4_k", shape, other)
    for wrong in (BLOCKS["q5_k"].spec, BlockSpec("q4_k", 256, 144), AffineSpec(4, 32, "offset")):
        assert direct("q4_k").target_spec(wrong) is None
