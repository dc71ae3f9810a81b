"""Plans as text, JSON and explanations."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.kernels import FakeKernel
from support.large import Size, write_large
from support.weights import random_weight, reference

import qcompile
from qcompile import backends
from qcompile.collapse import collapse, ranges
from qcompile.errors import OptionError, PlanError
from qcompile.passes.select import Policy, select
from qcompile.plans import Plan
from qcompile.site import EmbeddingSite, LinearSite, Site
from qcompile.spec import AffineSpec
from qcompile.target import Target
from qcompile.weight import WeightRef

LINEAR, ROWS = FakeKernel("fake.linear"), FakeKernel("fake.rows", "embedding")
TARGET = Target("cpu", "avx2")


def weight(name: str, bits: int = 4, n: int = 16) -> WeightRef:
    made = reference(random_weight(AffineSpec(bits, 8, "offset"), n, 32), name)
    stored = name.replace("layers", "blk").replace("model.", "")
    return replace(made, source=f"model.gguf: {stored}")


def sites() -> list[Site]:
    """Six layers; the second half of down_proj has another spec; a tied head."""
    embed = weight("model.embed.weight", n=64)
    found: list[Site] = [EmbeddingSite("model.embed", embed)]
    for layer in range(6):
        for name in ("up", "down"):
            path = f"model.layers.{layer}.{name}"
            bits = 8 if name == "down" and layer in (1, 2, 5) else 4
            found.append(LinearSite(path, weight(f"{path}.weight", bits)))
    return [*found, LinearSite("head", embed)]


def plan(*kernels: FakeKernel, policy: Policy = "error") -> Plan:
    entries = select(sites(), kernels, TARGET, policy)
    return Plan(TARGET, "gguf", "model.gguf", entries, notes=("a note",))


def test_layers_share_lines() -> None:
    groups = collapse(plan(LINEAR, ROWS).entries)
    assert [(group.name, len(group.entries)) for group in groups] == [
        ("model.embed", 1),
        ("model.layers.0-5.up", 6),
        ("model.layers.0,3-4.down", 3),
        ("model.layers.1-2,5.down", 3),
        ("head", 1),
    ]
    assert [(group.head, group.tail) for group in groups] == [
        ("", "model.embed"),
        ("model.layers.0-5", "up"),
        ("model.layers.0,3-4", "down"),
        ("model.layers.1-2,5", "down"),
        ("", "head"),
    ]


@pytest.mark.parametrize(
    ("names", "grouped"),
    [
        (["0.proj", "1.proj", "2.proj"], ["0-2.proj"]),
        (["layers.0", "layers.1"], ["layers.0-1"]),
        (["a.0.b.1", "a.1.b.1"], ["a.0-1.b.1"]),
        (["a1.b", "a2.b"], ["a1.b", "a2.b"]),
        (["layers.3.q"], ["layers.3.q"]),
    ],
)
def test_any_numbered_component_is_a_layer(names: list[str], grouped: list[str]) -> None:
    entries = select([LinearSite(n, weight(f"{n}.weight")) for n in names], [LINEAR], TARGET)
    groups = collapse(entries)
    assert [group.name for group in groups] == grouped
    assert all(group.name == f"{group.head}.{group.tail}".strip(".") for group in groups)


@pytest.mark.parametrize("numbers", [[], [4], [4, 6], [1, 2, 3, 5, 9, 10]])
def test_ranges_can_be_read_back(numbers: list[int]) -> None:
    back: list[int] = []
    for run in filter(None, ranges(numbers).split(",")):
        first, _, last = run.partition("-")
        back += range(int(first), int(last or first) + 1)
    assert back == numbers


@pytest.mark.parametrize(
    "name",
    ["model.layers.2.up", "model.layers.2.up.weight", "blk.2.up.weight", "blk.2.up"],
)
def test_a_site_has_four_names(name: str) -> None:
    text = plan(FakeKernel("other", refuse=lambda site: "not today"), LINEAR, ROWS).explain(name)
    assert text.splitlines() == [
        "model.layers.2.up  linear  uint4 g8 offset [16 x 32]  1,024 bytes",
        "  from model.gguf: blk.2.up.weight",
        "  [ ] other  refused  not today",
        "  [x] fake.linear  cost 1  as None",
        "  packed as affine uint4 g8 offset: 1,024 bytes",
    ]


@pytest.mark.parametrize(
    ("typo", "hint"),
    [
        ("model.layers.2.upp", "model.layers.2.up"),
        ("blk.3.donw.weight", "blk.3.down.weight"),
        ("model.embed.wieght", "model.embed.weight"),
    ],
)
def test_an_unknown_site_gets_the_nearest(typo: str, hint: str) -> None:
    with pytest.raises(OptionError) as caught:
        plan(LINEAR, ROWS).explain(typo)
    assert f"did you mean {hint!r}?" in caught.value.fix


def test_json_is_stable_and_complete() -> None:
    made = plan(LINEAR, ROWS)
    text = made.to_json()
    assert text == made.to_json() == plan(LINEAR, ROWS).to_json()
    content = json.loads(text)
    assert content["target"] == "cpu:avx2"
    assert content["bytes_before"] == made.bytes_before
    assert [site["site"] for site in content["sites"]] == [e.site.name for e in made.entries]
    first = content["sites"][0]
    assert first["verdicts"] == [{"kernel": "fake.rows", "cost": 1.0, "text": "as None"}]
    [rows, linear] = content["kernels"]
    assert rows == {"name": "fake.rows", "sites": 1, "stored": 4096, "packed": 4096, "shared": 0}
    assert (linear["sites"], linear["shared"]) == (13, 4096)
    assert rows["packed"] + linear["packed"] == content["bytes_after"]
    assert (first["runs_as"], first["edges"], first["bytes_after"]) == ("fake.rows", [], 4096)


def test_json_of_a_refused_plan_names_no_layout() -> None:
    content = json.loads(plan().to_json())
    assert {site["packed_layout"] for site in content["sites"]} == {None}
    assert {site["runs_as"] for site in content["sites"]} == {"no kernel"}


def test_a_shared_weight_is_counted_once() -> None:
    made = plan(LINEAR, ROWS)
    one = sum(e.site.weight.nbytes for e in made.entries[:-1])
    assert (made.bytes_before, made.bytes_after) == (one, one)
    floats = plan(policy="dequantize")
    assert floats.bytes_after == 4 * 32 * (64 + 12 * 16)
    assert not floats.refused


def test_loading_refuses_before_it_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_large(tmp_path / "m.gguf", Size(512, 64, 96, 2, 4, 2))

    def build(*_: object) -> None:
        raise AssertionError("the model is built")

    monkeypatch.setattr("qcompile.schemes.gguf.scheme.GGUFCheckpoint.build", build)
    monkeypatch.setattr(backends.load("cpu"), "KERNELS", ())
    with pytest.raises(PlanError, match="no kernel for 16 of 16 sites"):
        qcompile.load(path)
    with pytest.raises(AssertionError, match="is built"):
        qcompile.load(path, on_unsupported="dequantize")
