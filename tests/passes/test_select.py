"""Which kernel is chosen, what is said about the others, and what a policy does."""

from __future__ import annotations

import pytest
import torch
from support.gguf_blocks import finite_bytes
from support.kernels import FakeKernel
from support.weights import reference

from qcompile.errors import PlanError
from qcompile.kernel import Kernel
from qcompile.layout import QuantizedTensor
from qcompile.passes.select import Policy, require_kernels, select
from qcompile.plans import Entry, Plan
from qcompile.schemes import scheme_of
from qcompile.schemes.gguf.blocks import BLOCKS
from qcompile.site import EmbeddingSite, LinearSite, Site
from qcompile.spec import AffineSpec
from qcompile.target import Target
from qcompile.weight import WeightRef

scheme_of("gguf")  # registers the edges to ``affine``
TARGET = Target("cpu", "avx2")


def weight(name: str = "proj.weight") -> WeightRef:
    spec = BLOCKS["q8_0"].spec
    parts = {"data": finite_bytes("q8_0", 4, 2)}
    return reference(QuantizedTensor(spec, "gguf.q8_0", (4, 64), parts), name)


def choose(
    sites: list[Site], kernels: list[FakeKernel], policy: Policy = "error"
) -> tuple[Entry, ...]:
    asked: list[Kernel] = list(kernels)
    return select(sites, asked, TARGET, policy)


def names(entries: tuple[Entry, ...]) -> list[str]:
    return [entry.runs_as for entry in entries]


def test_the_cheapest_of_those_that_accept() -> None:
    kernels = [
        FakeKernel("slow", cost=9.0),
        FakeKernel("never", cost=0.1, refuse=lambda site: "K 64 is odd today"),
        FakeKernel("quick", layout="affine", cost=2.0),
        FakeKernel("other kind", "embedding", cost=0.0),
    ]
    [entry] = choose([LinearSite("proj", weight())], kernels)
    assert entry.runs_as == "quick"
    assert [(v.kernel, v.cost, v.text) for v in entry.verdicts] == [
        ("slow", 9.0, "as None"),
        ("never", None, "K 64 is odd today"),
        ("quick", 2.0, "as affine"),
    ]
    assert entry.layout == "affine"
    assert entry.route is not None
    assert [edge.name for edge in entry.route.edges] == ["gguf.q8_0 -> affine"]
    assert not kernels[3].seen


def test_a_kernel_judges_the_weight_at_the_end_of_its_route() -> None:
    kernel, plain = FakeKernel("affine", layout="affine"), FakeKernel("stored")
    choose([LinearSite("proj", weight(), bias=True)], [kernel, plain])
    [seen], [stored] = kernel.seen, plain.seen
    assert isinstance(seen.weight.spec, AffineSpec)
    assert (seen.weight.layout, seen.weight.shape) == ("affine", (4, 64))
    assert isinstance(seen, LinearSite)
    assert seen.bias
    assert stored.weight.layout == "gguf.q8_0"


def test_without_an_edge_a_kernel_is_not_asked() -> None:
    kernel = FakeKernel("tables", layout="lookup")
    [entry] = choose([LinearSite("proj", weight())], [kernel])
    assert not kernel.seen
    assert entry.runs_as == "no kernel"
    assert entry.verdicts[0].text == "no edge leads from gguf.q8_0 (q8_0) to lookup"


@pytest.mark.parametrize(
    ("embedding_costs", "linear_costs", "layout"),
    [((1, 10), (5, 1), "gguf.q8_0"), ((1, 3), (5, 1), "affine"), ((1, 1), (1, 1), "affine")],
)
def test_sites_of_one_weight_share_the_cheapest_common_layout(
    embedding_costs: tuple[int, int], linear_costs: tuple[int, int], layout: str
) -> None:
    kernels = [
        FakeKernel("rows.stored", "embedding", None, embedding_costs[0]),
        FakeKernel("rows.affine", "embedding", "affine", embedding_costs[1]),
        FakeKernel("dot.stored", "linear", None, linear_costs[0]),
        FakeKernel("dot.affine", "linear", "affine", linear_costs[1]),
    ]
    tied = weight("embed.weight")
    free = weight("free.weight")
    linears = (LinearSite("free", free), LinearSite("head", tied))
    entries = choose([EmbeddingSite("embed", tied), *linears], kernels)
    assert [entry.site.name for entry in entries] == ["embed", "free", "head"]
    assert {entries[0].layout, entries[2].layout} == {layout}
    tail = "affine" if layout == "affine" else "stored"
    assert names(entries)[::2] == [f"rows.{tail}", f"dot.{tail}"]
    # A weight of its own is decided on its own.
    cheaper = "affine" if linear_costs[1] <= linear_costs[0] else "stored"
    assert names(entries)[1] == f"dot.{cheaper}"


def test_no_common_layout_is_told_apart_from_a_refusal() -> None:
    kernels = [FakeKernel("rows", "embedding", None), FakeKernel("dot", "linear", "affine")]
    tied = weight("embed.weight")
    entries = choose([EmbeddingSite("embed", tied), LinearSite("head", tied)], kernels)
    assert names(entries) == ["no kernel", "no kernel"]
    with pytest.raises(PlanError, match="rows, dot: accepts, but another site of the same weight"):
        require_kernels(Plan(TARGET, "gguf", "file", entries))


def test_a_second_site_with_a_bias_counts_too() -> None:
    def with_bias(site: Site) -> str:
        return "no bias" if isinstance(site, LinearSite) and site.bias else ""

    kernels = [
        FakeKernel("plain", layout="affine", cost=1.0, refuse=with_bias),
        FakeKernel("any", cost=5.0),
    ]
    shared = weight()
    entries = choose([LinearSite("a", shared), LinearSite("b", shared, bias=True)], kernels)
    assert names(entries) == ["any", "any"]


def test_the_policy_error_names_the_site_and_every_reason() -> None:
    kernels = [FakeKernel("one", refuse=lambda s: "N is 4"), FakeKernel("two", layout="lookup")]
    entries = choose([LinearSite("a", weight("a")), LinearSite("b", weight("b"))], kernels)
    with pytest.raises(PlanError) as caught:
        require_kernels(Plan(TARGET, "gguf", "model.gguf", entries))
    assert caught.value.where == "a (model.gguf)"
    assert caught.value.reasons == (
        "2 x one: N is 4",
        "2 x two: no edge leads from gguf.q8_0 (q8_0) to lookup",
    )
    assert "2 of 2 sites on cpu:avx2" in caught.value.found
    assert "0.0 MiB" in caught.value.fix


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 1024), (torch.bfloat16, 512)])
def test_the_policy_dequantize_states_its_price(dtype: torch.dtype, size: int) -> None:
    never = FakeKernel("never", refuse=lambda site: "no")
    [entry] = select([LinearSite("a", weight())], [never], TARGET, "dequantize", dtype)
    assert (entry.runs_as, entry.layout, entry.bytes_after) == ("dequantized", "float", size)
    plan = Plan(TARGET, "gguf", "file", (entry,))
    require_kernels(plan)
    assert f"dequantized by policy: {size:,} bytes of floats" in plan.explain("a")


def test_the_policy_does_not_touch_sites_that_have_a_kernel() -> None:
    [entry] = choose([LinearSite("a", weight())], [FakeKernel("any")], "dequantize")
    assert (entry.runs_as, entry.dequantize) == ("any", False)


def test_no_sites_and_no_kernels() -> None:
    assert choose([], [FakeKernel("any")]) == ()
    [entry] = choose([LinearSite("a", weight())], [])
    assert entry.verdicts == ()
