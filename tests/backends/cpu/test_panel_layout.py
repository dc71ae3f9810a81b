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


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("form", ["symmetric", "zero", "offset"])
def test_every_byte_of_a_panel(bits: int, form: AffineForm) -> None:
    """Two groups, the second short, 19 rows: read back with Python's integers."""
    spec = AffineSpec(bits, 16, form, torch.float16 if bits % 2 else torch.float32)
    n, k = 19, 27
    weight = random_weight(spec, n, k)
    result = packed(weight)
    result.check("test")
    blob = bytes(result.parts["blob"].flatten().tolist())
    words = {8: (4, 4), 7: (4, 2, 1), 6: (4, 2), 5: (4, 1), 4: (4,), 3: (2, 1), 2: (2,), 1: (1,)}
    size = len(blob) // 2
    for row in range(n):
        at, lane = row // 16 * size, row % 16
        for group, units in enumerate((2, 2)):
            scale = blob[at + lane * spec.scale.itemsize :][: spec.scale.itemsize]
            wanted = weight.parts["scale"][row, group].reshape(1).view(torch.uint8)
            assert scale == bytes(wanted.tolist())
            at += 16 * spec.scale.itemsize
            if form != "symmetric":
                extra = weight.parts[form][row, group].float().reshape(1).view(torch.uint8)
                assert blob[at + 4 * lane : at + 4 * lane + 4] == bytes(extra.tolist())
                at += 64
            for unit in range(units):
                number = b""
                for width in words[bits]:
                    number += blob[at + width * lane : at + width * lane + width]
                    at += 16 * width
                for column in range(8):
                    where = group * 16 + unit * 8 + column
                    if where < k:
                        stored = int.from_bytes(number, "little") >> (bits * column)
                        code = int(weight.parts["codes"][row, where])
                        assert stored % 2**bits == (code - 2 ** (bits - 1)) % 2**bits


def test_codes_of_a_lookup_are_stored_as_they_are() -> None:
    spec = LookupSpec(4, 8, tuple(range(-8, 8)), torch.float16)
    codes = torch.arange(8, dtype=torch.uint8)[None]
    scale = torch.ones(1, 1, dtype=torch.float16)
    result = packed(QuantizedTensor(spec, "lookup", (1, 8), {"codes": codes, "scale": scale}))
    assert result.parts["blob"][0, 32:36].tolist() == [0x10, 0x32, 0x54, 0x76]
    assert result.parts["table"].tolist() == list(range(-8, 8))


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (FloatSpec(torch.float32), "is not affine"),
        (AffineSpec(4, 32, "zero", order="indexed"), "index"),
        (AffineSpec(4, 32, "zero", torch.bfloat16), "bfloat16"),
        (AffineSpec(9, 32, "zero"), "9 bits"),
        (LookupSpec(5, 32, tuple(range(32))), "5 bits"),
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
