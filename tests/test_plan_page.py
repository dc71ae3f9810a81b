"""A plan as a web page: whole, escaped, and the same facts as its JSON."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from support.kernels import FakeKernel
from test_plans import LINEAR, ROWS, TARGET, plan, weight

from qcompile.passes.select import select
from qcompile.plan_page import page
from qcompile.plans import Plan
from qcompile.site import EmbeddingSite, LinearSite, Site
from qcompile.verify import SiteError

EVIL = "<script>alert('x')</script>&\"'><img src=x onerror=alert(1)>"


class Reader(HTMLParser):
    """Tags with their attributes, the text outside of scripts and styles, and the scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text: list[str] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "input", "br", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif not self.open or self.open[-1] != "style":
            self.text.append(data)

    @property
    def words(self) -> str:
        """The text with single spaces."""
        return " ".join("".join(self.text).split())

    def all(self, tag: str, name: str, value: str) -> list[dict[str, str | None]]:
        """The attributes of the tags with this value of an attribute."""
        return [given for found, given in self.tags if found == tag and given.get(name) == value]


def read(made: Plan, errors: tuple[SiteError, ...] = ()) -> Reader:
    found = Reader(made.to_html(errors))
    assert not found.open
    return found


def test_every_site_is_a_row_with_its_facts() -> None:
    made = plan(LINEAR, ROWS)
    rows = read(made).all("details", "class", "site")
    assert [row["data-site"] for row in rows] == [entry.site.name for entry in made.entries]
    assert {row["data-runs"] for row in rows} == {"fake.linear", "fake.rows"}
    stored = [int(str(row["data-stored"])) for row in rows]
    assert stored == [entry.site.weight.nbytes for entry in made.entries]
    assert all("data-error" not in row for row in rows)


def test_totals_boxes_and_layers() -> None:
    found = read(plan(LINEAR, ROWS))
    assert "in the checkpoint16.0 KiB" in found.words
    assert "packed for the kernels16.0 KiB" in found.words
    assert "all 14 sites have a kernel" in found.words
    assert "model.layers x 6 (0-5)" in found.words
    assert "layers 1-2,5" in found.words
    assert "Bits of a stored weight in model.layers" in found.words
    assert len(found.all("div", "class", "chip")) == 5
    cells = [given for tag, given in found.tags if tag == "i"]
    assert len(cells) == 12
    assert cells[0]["title"] == "layer 0: 16 bits, uint4 g8 offset, fake.linear"
    assert "and 4.0 KiB shared with others" in found.words


def test_refusals_are_folded_by_kernel() -> None:
    made = plan(FakeKernel("fake.linear", refuse=lambda site: f"{site.name} is not liked"))
    found = read(made)
    assert "14 of 14 sites have no kernel" in found.words
    assert "fake.linear refuses 13 sites, 13 reasons" in found.words
    assert "cpu:avx2 refuses 1 sites, one reason1 x no kernel for embedding sites" in found.words
    assert "1 x head is not liked" in found.words
    assert "packed for the kernels" not in found.words


def test_policies_are_told() -> None:
    found = read(replace(plan(policy="dequantize"), emulation="run elsewhere"))
    assert "14 sites dequantized" in found.words
    assert "run elsewhere" in found.words
    assert "sites have a kernel" not in found.words


def test_measured_errors_are_shown() -> None:
    made = plan(LINEAR, ROWS)
    errors = tuple(SiteError(e.site.name, e.runs_as, 1e-7, 1e-6) for e in made.entries)
    found = read(made, errors)
    assert "verified 14 sites, worst error 1.0e-07" in found.words
    assert "relative L2 error 1.00e-07, allowed 1e-06" in found.words
    assert {row["data-error"] for row in found.all("details", "class", "site")} == {"1e-07"}
    wrong = (*errors[:-2], SiteError("model.layers.5.down", "fake.linear", 0.5, 1e-6))
    nothing = (*wrong, SiteError("head", "fake.linear", float("nan"), 1e-6))
    found = read(made, nothing)
    assert "verified 14 sites, worst error inf, 2 beyond what is allowed" in found.words
    assert "NaN" not in made.to_json(nothing)
    assert json.loads(made.to_json(nothing))["sites"][-1]["verified"] == {
        "relative_l2": None,
        "allowed": 1e-6,
    }


def test_the_page_loads_nothing_and_runs_one_script() -> None:
    found = read(plan(LINEAR, ROWS))
    [script] = found.scripts
    [policy] = [given for tag, given in found.tags if tag == "meta" and "http-equiv" in given]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy["http-equiv"] == "Content-Security-Policy"
    assert f"script-src 'sha256-{digest}';" in str(policy["content"])
    assert str(policy["content"]).startswith("default-src 'none';")
    for tag, given in found.tags:
        assert "src" not in given, tag
        assert given.get("href", "data:,") == "data:,", tag
        assert not any(name.startswith("on") for name in given), tag
    text = plan(LINEAR, ROWS).to_html()
    assert not re.search(r"https?:|url\(|@import|fetch\(|XMLHttp", text)
    assert "$" not in "".join(found.text)


@pytest.mark.parametrize("kernel", ["fake.linear", EVIL])
def test_names_of_a_file_are_text(kernel: str) -> None:
    named: list[Site] = [
        LinearSite(f"model.layers.{layer}.{EVIL}", replace(weight(EVIL), source=f"m: {EVIL}"))
        for layer in range(2)
    ]
    named.append(EmbeddingSite(EVIL, replace(weight("embed"), facts=EVIL)))
    refuse = FakeKernel("refuses", refuse=lambda site: EVIL)
    entries = select(named, (FakeKernel(kernel), refuse), TARGET)
    float_weight = weight(f"{EVIL}.norm")
    made = Plan(TARGET, "gguf", f"{EVIL}.gguf", entries, (float_weight,), "eager", (EVIL,), EVIL)
    plain = read(plan(LINEAR, ROWS))
    found = read(made)
    assert len(found.scripts) == 1
    assert found.scripts == plain.scripts
    tags = {tag for tag, _ in found.tags}
    assert tags <= {tag for tag, _ in plain.tags} | {"ul", "li", "details", "summary", "i"}
    assert {name for _, given in found.tags for name in given if name.startswith("on")} == set()
    assert "".join(found.text).count(EVIL) > 10
    assert found.all("details", "class", "site")[2]["data-site"] == EVIL


def test_a_page_is_made_from_json_alone() -> None:
    made = plan(LINEAR, ROWS)
    assert page(made.to_json()) == made.to_html() == plan(LINEAR, ROWS).to_html()


def test_a_plan_without_sites() -> None:
    found = read(Plan(TARGET, "gguf", "empty.gguf", ()))
    assert "all 0 sites have a kernel" in found.words
