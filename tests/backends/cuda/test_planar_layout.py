"""The planar layout: bit for bit, in whole and in runs of rows, and what does not fit it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from support.weights import random_weight, reference

from qcompile.backends.cuda import planes
from qcompile.backends.cuda.coding import E2M1_TWICE, Coding, coding_of
from qcompile.backends.cuda.layouts import DTYPES, LAYOUTS, layout_name
from qcompile.edge import find_route
from qcompile.errors import LayoutError
from qcompile.layout import QuantizedTensor
from qcompile.passes.weights.pack import pack
from qcompile.spec import AffineSpec, LookupSpec, ScaledSpec

FORMS = ("symmetric", "zero", "offset")
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
SHAPES = ((5, 336), (33, 512), (2, 16), (3, 7), (17, 1100))
Spec = AffineSpec | LookupSpec | ScaledSpec


def specs(scale: torch.dtype) -> list[Spec]:
    found: list[Spec] = [
        AffineSpec(bits, group, form, scale)  # type: ignore[arg-type]
        for bits, group, form in itertools.product(range(1, 9), (16, 48, 64, 4096), FORMS)
    ]
    found += [LookupSpec(4, 32, table, scale) for table in (IQ4, E2M1_TWICE)]
    return [*found, LookupSpec(3, 16, IQ4[:6], scale), ScaledSpec(torch.float8_e4m3fn, 128, scale)]


def by_hand(weight: QuantizedTensor) -> torch.Tensor:
    """Codes read by the layout's words, one by one: slow, and written apart from the code."""
    coding = coding_of(weight.spec, weight.shape[1])
    assert isinstance(coding, Coding)
    n, k = weight.shape
    codes = torch.empty(n, k, dtype=torch.int64)
    per_word = 16 // coding.low
    for column in range(k):
        run, j = divmod(column, coding.width)
        block, plane = divmod(run, coding.planes)
        at = block * (coding.planes // per_word) + plane // per_word
        word = weight.parts["codes"][at, :, j].long() & 0xFFFF
        code = word >> (coding.low * (plane % per_word)) & ((1 << coding.low) - 1)
        if coding.high:
            word = weight.parts["high"][block, :, j].long() & 0xFFFF
            code |= (word >> (coding.high * plane) & ((1 << coding.high) - 1)) << coding.low
        codes[:, column] = code
    return codes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exact_edges_keep_every_value(dtype: torch.dtype) -> None:
    for spec, (n, k) in itertools.product(specs(dtype), SHAPES):
        weight = random_weight(spec, n, k)
        route = find_route(weight.layout, spec, layout_name(dtype))
        assert route is not None
        stored = route.apply(weight)
        stored.check("here")
        if route.error is None:
            assert torch.equal(stored.dequantize(), weight.dequantize())
        else:
            assert isinstance(spec, AffineSpec)
            assert spec.form == "offset"
            offset = weight.parts["offset"].to(dtype).float()
            parts = {**weight.parts, "offset": offset}
            rounded = QuantizedTensor(spec, "affine", (n, k), parts)
            assert torch.equal(stored.dequantize(), rounded.dequantize())


def test_words_hold_codes_where_the_text_says() -> None:
    for spec, (n, k) in itertools.product(specs(torch.float16)[::5], SHAPES[:3]):
        weight = random_weight(spec, n, k)
        route = find_route(weight.layout, spec, "cuda.p16.float16")
        assert route is not None
        codes = weight.parts["data" if weight.layout == "scaled" else "codes"].view(torch.uint8)
        assert torch.equal(by_hand(route.apply(weight)), codes.long())


@pytest.mark.parametrize("bits", range(1, 9))
def test_packing_and_its_inverse(bits: int) -> None:
    for k in (16, 100, 512, 4096):
        coding = coding_of(AffineSpec(bits, 16, "symmetric"), k)
        assert isinstance(coding, Coding)
        codes = torch.randint(0, 1 << bits, (9, k), dtype=torch.uint8)
        words, high = planes.pack(codes, coding)
        found = planes.unpack(words, high, coding)
        assert torch.equal(found[:, :k], codes)
        assert not found[:, k:].any()


def test_runs_of_rows_are_the_rows_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qcompile.passes.weights.pack._BYTES_IN_FLIGHT", 336 * 3)
    for spec in specs(torch.float32)[::3]:
        weight = random_weight(spec, 17, 336)
        route = find_route(weight.layout, spec, "cuda.p16.float16")
        assert route is not None
        whole, by_runs = route.apply(weight), pack(reference(weight), route)
        assert all(torch.equal(part, by_runs.parts[name]) for name, part in whole.parts.items())
        rows = torch.tensor([4, 0, 16])
        assert torch.equal(whole.take_rows(rows).dequantize(), whole.dequantize()[rows])


@pytest.mark.parametrize(
    ("bits", "group", "stored"),
    [
        (2, 64, 2),
        (3, 64, 3),
        (4, 64, 4),
        (5, 64, 5),
        (6, 64, 6),
        (8, 64, 8),
        (1, 64, 2),
        (7, 64, 8),
    ],
)
def test_bytes_of_codes(bits: int, group: int, stored: int) -> None:
    layout = LAYOUTS[torch.float16]
    spec = AffineSpec(bits, group, "symmetric")
    scales = 256 * 4096 // group * 2
    assert layout.nbytes(spec, (256, 4096)) == 256 * 4096 * stored // 8 + scales


def test_padding_is_less_than_a_sixteenth_or_as_little_as_there_can_be() -> None:
    for bits, group, k in itertools.product(range(1, 9), (16, 64, 96, 4096), range(16, 4096, 112)):
        coding = coding_of(AffineSpec(bits, group, "symmetric"), k)
        assert isinstance(coding, Coding)
        least = -(-k // (coding.planes * 16)) * coding.planes * 16
        assert coding.blocks(k) * coding.block <= max(least, k * 17 / 16)
        assert coding.group % coding.width == 0
        assert coding.planes % coding.run == 0


def test_what_does_not_fit_names_its_number() -> None:
    for spec, said in (
        (AffineSpec(4, 24, "zero"), "groups of 24 columns"),
        (AffineSpec(4, 8, "zero"), "groups of 8 columns"),
        (AffineSpec(4, 32, "zero", order="indexed"), "uneven"),
        (LookupSpec(5, 32, tuple(range(32))), "codes of 5 bits"),
        (ScaledSpec(torch.float8_e5m2, 64), "torch.float8_e5m2"),
    ):
        found = coding_of(spec, 96)
        assert isinstance(found, str)
        assert said in found
        with pytest.raises(LayoutError, match=r"cuda\.p16"):
            LAYOUTS[torch.float16].fields(spec, (4, 96))


def test_values_that_cannot_be_kept_are_errors() -> None:
    spec = AffineSpec(4, 32, "zero", torch.float32)
    weight = random_weight(spec, 3, 64)
    route = find_route("affine", spec, "cuda.p16.float16")
    assert route is not None
    for name, value, said in (
        ("scale", 1e6, "1e+06 among the scales"),
        ("zero", -1, "zero points from -1"),
        ("zero", 17, "to 17"),
    ):
        changed = weight.parts[name].clone()
        changed[1, 1] = value
        wrong = QuantizedTensor(spec, "affine", (3, 64), {**weight.parts, name: changed})
        with pytest.raises(LayoutError) as caught:
            route.apply(wrong)
        assert said in str(caught.value)


def test_floats_that_are_no_numbers_are_errors() -> None:
    spec = ScaledSpec(torch.float8_e4m3fn, 64)
    weight = random_weight(spec, 3, 64)
    data = weight.parts["data"].view(torch.uint8).clone()
    data[2, 5] = 0xFF
    parts = {**weight.parts, "data": data.view(torch.float8_e4m3fn)}
    route = find_route("scaled", spec, "cuda.p16.bfloat16")
    assert route is not None
    with pytest.raises(LayoutError, match="no number"):
        route.apply(replace(weight, parts=parts))


def test_a_table_with_a_value_of_eight_bits_is_refused() -> None:
    found = coding_of(LookupSpec(2, 32, (-128, 0, 1, 2)), 64)
    assert isinstance(found, str)
    assert "-128" in found
