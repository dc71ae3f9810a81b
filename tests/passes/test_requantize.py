"""Rounding a weight for kernels that take 8 bits, on request."""

from __future__ import annotations

import pytest
import torch
from support.kernels import FakeKernel
from support.weights import random_weight, reference

from qcompile.kernel import Kernel
from qcompile.layout import QuantizedTensor
from qcompile.passes.select import require_kernels, select
from qcompile.passes.weights.pack import pack
from qcompile.passes.weights.requantize import measure, requantized
from qcompile.plans import Plan
from qcompile.site import EmbeddingSite, LinearSite, Site
from qcompile.spec import AffineSpec
from qcompile.target import Target

TARGET = Target("cpu", "generic")
ODD = AffineSpec(6, 16, "offset")


def refuses_odd(site: Site) -> str:
    spec = site.weight.spec
    assert isinstance(spec, AffineSpec)
    return "" if spec.bits == 8 and spec.group % 32 == 0 else f"a group of {spec.group}"


def plan(*kernels: Kernel, shape: tuple[int, int] = (40, 96)) -> Plan:
    weight = reference(random_weight(ODD, *shape))
    sites: list[Site] = [LinearSite("proj", weight), EmbeddingSite("embed", weight)]
    entries = select(sites, kernels, TARGET, "requantize", torch.float16)
    return Plan(TARGET, "gguf", "model.gguf", entries)


LINEAR = FakeKernel("fake.linear", layout="affine", refuse=refuses_odd)
ROWS = FakeKernel("fake.rows", "embedding", layout="affine", refuse=refuses_odd)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("group", [32, 40, 100])
def test_values_move_as_little_as_the_edge_says(group: int, dtype: torch.dtype) -> None:
    for factor in (1.0, 1e-4, 1e-6):
        weight = random_weight(ODD, 8, 100)
        weight.parts["scale"].mul_(factor)
        weight.parts["offset"].mul_(factor)
        weight.parts["scale"][0], weight.parts["offset"][0] = 0.0, 0.0
        _, edge = requantized(reference(weight), group, dtype)
        rounded = edge.apply(weight)
        rounded.check("test")
        exact = weight.dequantize()
        padded = torch.nn.functional.pad(exact, (0, -100 % group)).view(8, -1, group)
        largest = padded.abs().amax(-1).repeat_interleave(group, 1)[:, :100]
        # Half a step below the normal numbers of float16.
        bound = largest / 252 + (2.0**-25 if dtype == torch.float16 else 0.0) * 127
        assert bool(((rounded.dequantize() - exact).abs() <= bound).all())


def test_a_site_that_is_refused_is_rounded_and_says_so() -> None:
    made = plan(LINEAR, ROWS)
    require_kernels(made)
    assert [entry.runs_as for entry in made.entries] == [
        "fake.linear, requantized",
        "fake.rows, requantized",
    ]
    for entry in made.entries:
        assert entry.route is not None
        assert entry.route.spec == AffineSpec(8, 32, "symmetric", torch.float16)
        assert [v.text for v in entry.verdicts] == ["a group of 16"]
    said = made.explain("proj")
    assert "[x]" not in said
    assert "requantized by policy for fake.linear: relative L2 error measured when packed" in said
    assert "edge affine -> affine: requantized to 8 bits by groups of 32" in said
    assert "2 sites requantized to 8 bits: measured when packed" in str(made)
    found = made.measured("proj.weight", 0.004)
    assert "worst relative L2 error 4.0e-03" in str(found)
    assert "relative L2 error 4.0e-03" in found.explain("proj")
    assert '"requantization_error": 0.004' in found.to_json()


def test_the_coarser_group_is_tried_next() -> None:
    def takes_channels(site: Site) -> str:
        spec = site.weight.spec
        assert isinstance(spec, AffineSpec)
        return "" if spec.group == 96 else f"a group of {spec.group}"

    made = plan(
        FakeKernel("fake.linear", layout="affine", refuse=takes_channels),
        FakeKernel("fake.rows", "embedding", layout="affine", refuse=takes_channels),
    )
    assert all(e.route is not None and "groups of 96" in str(e.route.error) for e in made.entries)


def test_a_site_that_no_rounding_helps_stays_refused() -> None:
    made = plan(LINEAR, FakeKernel("fake.rows", "embedding", refuse=lambda site: "never"))
    assert len(made.refused) == 2
    assert not any(entry.requantized for entry in made.entries)


def test_the_error_is_measured_on_all_rows() -> None:
    whole = random_weight(ODD, 40, 96)
    weight = reference(whole)
    [entry, _] = plan(LINEAR, ROWS).entries
    assert entry.route is not None
    packed: QuantizedTensor = pack(weight, entry.route)
    exact = whole.dequantize()
    error = float((packed.dequantize() - exact).norm() / exact.norm())
    assert measure(weight, packed) == pytest.approx(error, rel=1e-4)
    assert 1e-3 < error < 1e-2
    assert measure(weight, whole) == 0.0
