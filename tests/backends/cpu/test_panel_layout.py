"""The panel layout, against bytes written down by hand."""

from __future__ import annotations

import doctest
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from support.weights import random_weight

from qcompile.backends.cpu import panel
from qcompile.edge import find_route
from qcompile.errors import LayoutError
from qcompile.layout import QuantizedTensor, layout_of
from qcompile.spec import AffineForm, AffineSpec, FloatSpec, LookupSpec, ScaledSpec, Spec


def packed(weight: QuantizedTensor) -> QuantizedTensor:
    route = find_route(weight.layout, weight.spec, panel.NAME)
    assert route is not None
    return route.apply(weight)


def test_the_example_in_the_docstring() -> None:
    module: ModuleType = panel
    found = doctest.testmod(module)
    assert found.attempted > 5
    assert found.failed == 0


def code_in(blob: bytes, codes: int, units: int, bits: int, place: int, lane: int) -> int:
    """The code of a row at a place of a chunk, whose codes begin at ``codes``."""
    unit, quad, byte = place // 16, place % 16 // 4, 4 * lane + place % 4
    if bits == 8:
        return blob[codes + 256 * unit + 64 * quad + byte]
    found = at = 0
    if bits & 4:
        nibbles = blob[codes + 128 * unit + 64 * (quad // 2) + byte]
        found, at = nibbles >> 4 * (quad % 2) & 15, 128 * units
    if bits & 2:
        found |= (blob[codes + at + 64 * unit + byte] >> 2 * quad & 3) << (bits & 4)
        at += 64 * units
    if bits & 1:
        mask = int.from_bytes(blob[codes + at + 32 * unit + 8 * quad :][:8], "little")
        found |= (mask >> byte & 1) << (bits & 6)
    return found


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("form", ["symmetric", "zero", "offset"])
@pytest.mark.parametrize(("group", "k"), [(16, 27), (20, 300)])
def test_every_byte_of_a_panel(bits: int, form: AffineForm, group: int, k: int) -> None:
    """A short last group, 19 rows, one or two chunks: read back with Python's integers."""
    spec = AffineSpec(bits, group, form, torch.float16 if bits % 2 else torch.float32)
    n, padded = 19, -(-group // 16) * 16
    weight = random_weight(spec, n, k)
    result = packed(weight)
    result.check("test")
    blob = bytes(result.parts["blob"].flatten().tolist())
    size, wide, each = len(blob) // 2, spec.scale.itemsize, 256 // padded
    head = 16 * (wide + {"zero": 2, "offset": 4}.get(form, 0))
    kind = {"zero": torch.int16, "offset": torch.float32}.get(form)
    for row in range(n):
        at, lane = row // 16 * size, row % 16
        for first in range(0, -(-k // group), each):
            groups = range(first, min(first + each, -(-k // group)))
            units = sum(-(-min(group, k - g * group) // 16) for g in groups)
            codes = at + -(-len(groups) * head // 64) * 64
            for g in groups:
                here = at + (g - first) * head
                wanted = weight.parts["scale"][row, g].reshape(1).view(torch.uint8)
                assert blob[here + lane * wide :][:wide] == bytes(wanted.tolist())
                if kind is not None:
                    extra = weight.parts[form][row, g].to(kind).reshape(1).view(torch.uint8)
                    place = here + 16 * wide + lane * kind.itemsize
                    assert blob[place : place + kind.itemsize] == bytes(extra.tolist())
                for column in range(min(group, k - g * group)):
                    found = code_in(blob, codes, units, bits, (g - first) * padded + column, lane)
                    assert found == int(weight.parts["codes"][row, g * group + column])
            at = codes + units * 32 * (bits & 14) + -(-units * 32 * (bits & 1) // 64) * 64


def test_codes_of_a_lookup_are_stored_as_they_are() -> None:
    spec = LookupSpec(4, 16, tuple(range(-8, 8)), torch.float16)
    codes = torch.arange(16, dtype=torch.uint8)[None]
    scale = torch.ones(1, 1, dtype=torch.float16)
    result = packed(QuantizedTensor(spec, "lookup", (1, 16), {"codes": codes, "scale": scale}))
    assert result.parts["blob"][0, 64:68].tolist() == [0x40, 0x51, 0x62, 0x73]
    assert result.parts["table"].tolist() == list(range(-8, 8))


@pytest.mark.parametrize(
    ("group", "k", "cut"), [(512, 1024, 256), (600, 1800, 200), (300, 600, 150)]
)
def test_wide_groups_are_cut_evenly(group: int, k: int, cut: int) -> None:
    weight = random_weight(AffineSpec(4, group, "offset"), 20, k)
    found = packed(weight)
    found.check("here")
    assert panel.arguments(found.spec, found.shape)[3] == cut
    assert torch.equal(found.dequantize(), weight.dequantize())


def test_a_zero_that_does_not_fit_is_refused() -> None:
    weight = random_weight(AffineSpec(8, 16, "zero"), 16, 16)
    weight.parts["zero"][3, 0] = 40000
    with pytest.raises(LayoutError, match="a zero of 40000"):
        packed(weight)


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (FloatSpec(torch.float32), "is not affine"),
        (AffineSpec(4, 32, "zero", order="indexed"), "index"),
        (AffineSpec(4, 32, "zero", torch.bfloat16), "bfloat16"),
        (AffineSpec(9, 32, "zero"), "9 bits"),
        (LookupSpec(5, 32, tuple(range(32))), "5 bits"),
        (AffineSpec(4, 32, "offset", nested=128), "in 256 columns, not 128"),
    ],
    ids=str,
)
def test_what_does_not_fit(spec: Spec, why: str) -> None:
    with pytest.raises(LayoutError, match=why):
        layout_of(panel.NAME).fields(spec, (16, 32))


@pytest.mark.parametrize("group", [12, 20, 32, 200, 999])
def test_runs_of_rows_are_the_rows_of_the_whole(group: int) -> None:
    weight = random_weight(AffineSpec(5, group, "zero"), 70, 200)
    whole = packed(weight)
    assert torch.equal(whole.dequantize(), weight.dequantize())
    for start, stop in ((0, 16), (16, 48), (64, 70), (32, 32)):
        run = packed(weight.take_rows(slice(start, stop)))
        assert torch.equal(run.parts["blob"], whole.parts["blob"][start // 16 : -(-stop // 16)])
    taken = whole.take_rows(slice(16, 48))
    assert torch.equal(taken.dequantize(), weight.dequantize()[16:48])
    for rows in (slice(0, 17), slice(1, 16), torch.tensor([3])):
        with pytest.raises(LayoutError, match="interleaves 16 rows"):
            whole.take_rows(rows)


@pytest.mark.parametrize("group", [20, 32, 200, 999])
def test_permuted_columns_are_put_in_order(group: int) -> None:
    columns = torch.arange(200) // group
    order = columns[torch.randperm(200, generator=torch.Generator().manual_seed(0))]
    sequential = AffineSpec(4, group, "zero")
    plain, spec = random_weight(sequential, 37, 200), replace(sequential, order="permuted")
    parts = {**plain.parts, "g_idx": order.to(torch.int32)}
    weight = QuantizedTensor(spec, "affine", plain.shape, parts)
    found = packed(weight)
    found.check("here")
    assert torch.equal(found.dequantize(), weight.dequantize())
    assert sorted(found.parts["columns"].tolist()) == list(range(200))


def test_a_narrow_float_that_is_no_number_is_refused() -> None:
    spec = ScaledSpec(torch.float8_e4m3fn, 8, torch.float32)
    weight = random_weight(spec, 16, 8)
    assert torch.equal(packed(weight).dequantize(), weight.dequantize())
    weight.parts["data"].view(torch.uint8)[3, 5] = 0xFF
    with pytest.raises(LayoutError, match="NaN"):
        packed(weight)
