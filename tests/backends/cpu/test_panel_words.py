"""Panels straight from words are, byte for byte, those of the way over one byte a code."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.pack_awq import interleave
from support.weights import random_weight

from qcompile import backends
from qcompile.backends.cpu.panel import NAME
from qcompile.edge import edges, find_route
from qcompile.layout import QuantizedTensor
from qcompile.schemes import scheme_of
from qcompile.schemes.words import pack_words
from qcompile.spec import AffineForm, AffineSpec, GroupOrder

backends.load("cpu").prepare()
for _scheme in ("gptq", "awq", "compressed_tensors"):
    scheme_of(_scheme)


def stored(affine: QuantizedTensor, layout: str) -> QuantizedTensor:
    """The weight in a scheme's words."""
    spec, parts = affine.spec, affine.parts
    assert isinstance(spec, AffineSpec)
    codes, by_rows = parts["codes"], layout in ("ct.packed", "awq.gemv")
    if layout == "awq":
        words = interleave(codes.t().long().numpy())
    elif by_rows:
        words = pack_words(codes, spec.bits, 1)
    else:
        words = pack_words(codes.t().contiguous(), spec.bits, 0)
    names = ("packed", "scale") if layout == "ct.packed" else ("qweight", "scales")
    found = {names[0]: words, names[1]: parts["scale"]}
    if "zero" in parts:
        found["zeros"] = parts["zero"].to(torch.uint8)
    for name in ("zeros", names[1]):
        if name in found and not by_rows:
            found[name] = found[name].t().contiguous()
    if "g_idx" in parts:
        found["g_idx"] = parts["g_idx"]
    weight = QuantizedTensor(spec, layout, affine.shape, found)
    weight.check(layout)
    assert torch.equal(weight.dequantize(), affine.dequantize())
    return weight


def packed(weight: QuantizedTensor, steps: int = 1) -> QuantizedTensor:
    route = find_route(weight.layout, weight.spec, NAME)
    assert route is not None
    assert len(route.edges) == steps
    assert route.error is None
    found = route.apply(weight)
    found.check("here")
    return found


def assert_same(found: QuantizedTensor, wanted: QuantizedTensor) -> None:
    assert found.spec == wanted.spec
    assert found.parts.keys() == wanted.parts.keys()
    for name, part in wanted.parts.items():
        assert torch.equal(found.parts[name], part), name


def permuted(weight: QuantizedTensor) -> QuantizedTensor:
    spec = weight.spec
    assert isinstance(spec, AffineSpec)
    k = weight.shape[1]
    order = torch.randperm(k, generator=torch.Generator().manual_seed(3))
    index = (torch.arange(k) // spec.group)[order].to(torch.int32)
    parts = {**weight.parts, "g_idx": index}
    return QuantizedTensor(replace(spec, order="permuted"), "affine", weight.shape, parts)


@pytest.mark.parametrize("order", ["sequential", "permuted"])
@pytest.mark.parametrize("form", ["symmetric", "zero"])
@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize(("group", "k"), [(32, 64), (128, 544), (20, 300), (999, 999), (7, 27)])
def test_gptq(bits: int, form: AffineForm, order: GroupOrder, group: int, k: int) -> None:
    for n in (1, 7, 48, 150):
        affine = random_weight(AffineSpec(bits, group, form, torch.float16), n, k, seed=n)
        if order == "permuted":
            affine = permuted(affine)
        assert_same(packed(stored(affine, "gptq")), packed(affine))


@pytest.mark.parametrize("layout", ["awq", "awq.gemv", "ct.packed"])
@pytest.mark.parametrize("form", ["symmetric", "zero"])
@pytest.mark.parametrize(("group", "k"), [(32, 64), (128, 544), (24, 304), (512, 1024)])
def test_words_of_four_bits(layout: str, form: AffineForm, group: int, k: int) -> None:
    for n in (8, 48, 152):
        affine = random_weight(AffineSpec(4, group, form, torch.bfloat16), n, k, seed=n)
        assert_same(packed(stored(affine, layout)), packed(affine))


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize(("group", "k"), [(32, 64), (20, 300), (7, 27), (512, 1024)])
def test_compressed_tensors(bits: int, group: int, k: int) -> None:
    for n in (1, 48):
        affine = random_weight(AffineSpec(bits, group, "zero"), n, k, seed=n)
        assert_same(packed(stored(affine, "ct.packed")), packed(affine))
    affine = permuted(affine)
    assert_same(packed(stored(affine, "ct.packed"), steps=2), packed(affine))


@pytest.mark.parametrize("layout", ["gptq", "awq", "awq.gemv", "ct.packed"])
def test_runs_of_rows(layout: str) -> None:
    """A run's words of GPTQ and AWQ lie as far apart as those of the whole weight."""
    weight = stored(random_weight(AffineSpec(4, 32, "zero"), 168, 320), layout)
    whole = packed(weight).parts["blob"]
    for start, stop in ((0, 16), (16, 160), (144, 168)):
        run = packed(weight.take_rows(slice(start, stop)))
        assert torch.equal(run.parts["blob"], whole[start // 16 : -(-stop // 16)])
    assert packed(weight.take_rows(slice(32, 32))).parts["blob"].shape == (0, whole.shape[1])


def test_groups_that_are_uneven_have_no_way() -> None:
    spec = AffineSpec(4, 32, "zero", torch.float16, "indexed")
    assert find_route("gptq", spec, NAME) is None
    assert {e.source for e in edges() if e.dest == NAME} >= {"gptq", "awq"}
