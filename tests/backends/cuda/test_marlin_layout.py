"""Marlin's layout: bit for bit, round trips, padding, what an edge loses and refuses."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from support.marlin_ops import codes_of, source_column, zeros_of
from support.weights import random_weight, reference

from qcompile.backends.cuda import marlin
from qcompile.backends.cuda.marlin_layout import (
    LAYOUTS,
    ORDERS,
    by_groups,
    by_rows,
    pack_codes,
    pack_zeros,
    padded,
    unpack_codes,
    unpack_zeros,
)
from qcompile.edge import find_route
from qcompile.errors import LayoutError
from qcompile.layout import QuantizedTensor
from qcompile.passes.weights.pack import pack
from qcompile.spec import AffineSpec, LookupSpec

assert marlin.RULES  # registers the edges
HALF = torch.float16

# SHA-256 of the packed words, made with a description of the layout that was written apart from
# this one and compared with three public references: bits, K and N, or bits, groups and N.
WEIGHTS = {
    (4, 16, 64): "07e30166b0cb7cbb",
    (4, 64, 128): "f1d547749f253f25",
    (4, 128, 64): "263f629ac000105f",
    (4, 128, 192): "658db0978bd56c49",
    (8, 16, 64): "0d4dacc45b4d5d51",
    (8, 64, 128): "1447bc8512a7c77c",
    (8, 128, 64): "518c4b3e798b91f5",
    (8, 128, 192): "5b596697cfcc744c",
}
ZEROS = {
    (4, 1, 64): "d627c7b8850a6302",
    (4, 3, 192): "af3e1f42fa900d38",
    (8, 1, 64): "3c4bdcfd96a22871",
    (8, 3, 192): "83f397e9166b760f",
}


def pattern(lines: int, entries: int, bits: int) -> torch.Tensor:
    """The numbers behind the hashes, uint8 ``[lines, entries]``."""
    a, b = torch.arange(lines)[:, None], torch.arange(entries)[None, :]
    return ((a * 7 + b * 13 + a * b // 5) % (1 << bits)).to(torch.uint8)


def hashed(words: torch.Tensor) -> str:
    return hashlib.sha256(words.contiguous().numpy().tobytes()).hexdigest()[:16]


@pytest.mark.parametrize(("bits", "k", "n"), WEIGHTS)
def test_weights_are_bit_exact(bits: int, k: int, n: int) -> None:
    codes = pattern(k, n, bits)
    words = pack_codes(codes.t().contiguous(), bits).flatten(1)
    assert tuple(words.shape) == (k // 16, n * bits // 2)
    assert hashed(words) == WEIGHTS[bits, k, n]
    assert torch.equal(codes_of(words, bits, k, n), codes.long())
    assert torch.equal(unpack_codes(words, bits, n, k), codes.t())


def test_the_first_words() -> None:
    words = pack_codes(pattern(16, 64, 4).t().contiguous(), 4).flatten()
    found = [f"{int(word) & 0xFFFFFFFF:08x}" for word in words[:4]]
    assert found == ["50f7c880", "23ba6810", "f78d08b0", "ba509840"]


@pytest.mark.parametrize(("bits", "groups", "n"), ZEROS)
def test_zero_points_are_bit_exact(bits: int, groups: int, n: int) -> None:
    zeros = pattern(groups, n, bits)
    words = pack_zeros(zeros, bits)
    assert hashed(words) == ZEROS[bits, groups, n]
    assert torch.equal(zeros_of(words, bits, groups, n), zeros.long())
    assert torch.equal(unpack_zeros(words, bits), zeros)


def test_orders_of_scales() -> None:
    columns = torch.arange(192)
    assert torch.equal(by_groups(columns), source_column(192, True))
    assert torch.equal(by_rows(columns), source_column(192, False))
    assert by_groups(columns)[:9].tolist() == [0, 8, 16, 24, 32, 40, 48, 56, 1]
    assert by_rows(columns)[:10].tolist() == [0, 1, 8, 9, 16, 17, 24, 25, 2, 3]
    for turn in (by_groups, by_rows):
        assert torch.equal(turn(turn(columns)), columns)


def specs() -> Iterator[AffineSpec]:
    for bits in range(1, 9):
        yield AffineSpec(bits, 32, "symmetric", HALF)
    for group, form in itertools.product((32, 64, 128, 4096), ("symmetric", "zero")):
        yield AffineSpec(4, group, form, HALF)  # type: ignore[arg-type]
    yield AffineSpec(3, 64, "zero", HALF)
    yield AffineSpec(8, 128, "zero", HALF)
    yield AffineSpec(4, 48, "zero", HALF)


# Whole tiles; K of 64 mod 128, where N has tiles of 128; neither a multiple of anything.
SHAPES = ((64, 128), (64, 64), (128, 192), (24, 100), (200, 130), (1, 33))


def permuted(weight: QuantizedTensor) -> QuantizedTensor:
    """The same weight with its columns shuffled."""
    assert isinstance(weight.spec, AffineSpec)
    groups = torch.arange(weight.shape[1]) // weight.spec.group
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(1))
    parts = {**weight.parts, "g_idx": groups[order].to(torch.int32)}
    return QuantizedTensor(replace(weight.spec, order="permuted"), "affine", weight.shape, parts)


@pytest.mark.parametrize("spec", specs(), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_come_back(spec: AffineSpec, shape: tuple[int, int]) -> None:
    plain = random_weight(spec, *shape)
    for weight in (plain, permuted(plain)):
        for order in ORDERS:
            route = find_route("affine", weight.spec, order.name)
            assert (route is None) == (spec.bits > order.bits)
            if route is None:
                continue
            assert (route.error is None) == (order.dtype == HALF)
            packed = route.apply(weight)
            packed.check("test")
            if route.error is None:
                assert torch.equal(packed.dequantize(), weight.dequantize())
            else:
                exact, unit = weight.dequantize(), 2.0**-8
                assert bool(((packed.dequantize() - exact).abs() <= unit * exact.abs()).all())


def test_packing_by_runs_is_packing_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = AffineSpec(4, 64, "zero", HALF)
    weight = random_weight(spec, 300, 192)
    route = find_route("affine", spec, "cuda.marlin4.float16")
    assert route is not None
    whole = route.apply(weight)
    monkeypatch.setattr("qcompile.passes.weights.pack._BYTES_IN_FLIGHT", 192 * 128)
    by_runs = pack(reference(weight), route)
    for name, part in whole.parts.items():
        assert torch.equal(part, by_runs.parts[name])
    some = whole.take_rows(slice(128, 256))
    assert torch.equal(some.dequantize(), weight.dequantize()[128:256])
    with pytest.raises(LayoutError, match="interleaves 128 rows"):
        whole.take_rows(slice(100, 200))


def test_sizes() -> None:
    def of(group: int, columns: int) -> tuple[int, int, int, int]:
        size = padded(AffineSpec(4, group, "symmetric"), columns)
        return size.columns, size.groups, size.tile, size.rows(1)

    assert of(32, 128) == (128, 4, 64, 64)
    assert of(32, 192) == (192, 6, 128, 128)
    assert of(128, 192) == (256, 2, 64, 64)
    assert of(48, 100) == (192, 4, 128, 128)
    assert of(4096, 100) == (128, 1, 64, 64)
    assert of(100, 100) == (128, 1, 64, 64)
    with_zero = AffineSpec(4, 128, "zero", HALF)
    bytes_of = LAYOUTS["cuda.marlin4.float16"].nbytes(with_zero, (4096, 4096))
    assert bytes_of == 4096 * 4096 // 2 + 4096 * 32 * 2 + 4096 * 32 // 2


def test_what_is_refused() -> None:
    name = "cuda.marlin4.float16"
    for spec in (
        AffineSpec(4, 32, "offset"),
        AffineSpec(4, 32, "zero", order="indexed"),
        AffineSpec(5, 32, "symmetric"),
    ):
        assert find_route("affine", spec, name) is None
        with pytest.raises(LayoutError):
            LAYOUTS[name].fields(spec, (64, 64))
    assert find_route("lookup", LookupSpec(4, 32, tuple(range(16))), name) is None

    weight = random_weight(AffineSpec(4, 32, "zero"), 64, 64)
    route = find_route("affine", weight.spec, name)
    assert route is not None
    weight.parts["zero"][3, 1] = 16
    with pytest.raises(LayoutError, match=r"zero point of 16[\s\S]*0 to 15"):
        route.apply(weight)
    weight.parts["zero"][3, 1] = -1
    with pytest.raises(LayoutError, match="zero point of -1"):
        route.apply(weight)
    weight.parts["zero"][3, 1] = 0
    weight.parts["scale"][0, 0] = 1e6
    with pytest.raises(LayoutError, match=r"a scale of 1e\+06[\s\S]*float16"):
        route.apply(weight)
