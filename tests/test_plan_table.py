"""A plan's table at several widths."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.kernels import FakeKernel
from test_plans import LINEAR, ROWS, TARGET, plan, sites, weight

from qcompile.passes.select import select
from qcompile.plan_table import Style, table
from qcompile.plan_text import kernel_totals, size_text
from qcompile.plans import Plan
from qcompile.site import EmbeddingSite, LinearSite, Site


def test_text() -> None:
    assert str(plan(LINEAR, ROWS)).splitlines() == [
        "plan  model.gguf  scheme gguf  target cpu:avx2  emitter inductor",
        "  site                    spec             shape      kernel             packed",
        "  model.embed  embedding  uint4 g8 offset  [64 x 32]  fake.rows         4.0 KiB",
        "  model.layers.0-5  6 layers",
        "    up         linear     uint4 g8 offset  [16 x 32]  fake.linear  6 x  1.0 KiB",
        "  model.layers.0,3-4  3 layers",
        "    down       linear     uint4 g8 offset  [16 x 32]  fake.linear  3 x  1.0 KiB",
        "  model.layers.1-2,5  3 layers",
        "    down       linear     uint8 g8 offset  [16 x 32]  fake.linear  3 x  1.0 KiB",
        "  head         linear     uint4 g8 offset  [64 x 32]  fake.linear       4.0 KiB",
        "",
        "  kernel       sites    stored    packed",
        "  fake.rows        1   4.0 KiB   4.0 KiB",
        "  fake.linear     13  12.0 KiB  12.0 KiB  and 4.0 KiB shared with others",
        "  all sites       14  16.0 KiB  16.0 KiB  100% of 16-bit floats",
        "  note: a note",
    ]


def test_a_wide_terminal_shows_layouts_and_a_narrow_one_two_lines() -> None:
    made = plan(LINEAR, ROWS)
    wide, narrow = made.text(200), made.text(50)
    assert "affine uint4 g8 offset" in wide
    assert "affine uint4 g8 offset" not in str(made)
    lines = narrow.splitlines()
    at = lines.index("    up         fake.linear  6 x  1.0 KiB")
    assert lines[at + 1] == "               uint4 g8 offset [16 x 32]"


@pytest.mark.parametrize("width", [1, 40, 55, 66, 80, 100, 200])
def test_lines_fit_and_say_the_same(width: int) -> None:
    made = plan(FakeKernel("fake.linear", refuse=lambda site: "K 32 is no multiple of 64 " * 5))
    made = replace(made, notes=("a word " * 30,))
    lines = made.text(width).splitlines()
    assert max(map(len, lines)) <= max(width, 40)
    words = " ".join(made.text(width).split())
    for text in ("14 of 14 sites have no kernel", "K 32 is no multiple of 64 K 32", "a word " * 29):
        assert text in words
    assert words.count("uint8 g8 offset") == 1
    assert words.count("[16 x 32]") == 3


def test_text_says_what_was_refused() -> None:
    text = str(plan(FakeKernel("fake.linear", refuse=lambda site: "K 32 is no multiple of 64")))
    assert "14 of 14 sites have no kernel" in text
    assert "13 x fake.linear: K 32 is no multiple of 64" in text
    assert "1 x the backend cpu has no kernel for embedding sites yet" in text
    assert "of 16-bit floats" not in text
    assert text.splitlines()[-5].split() == ["all", "sites", "14", "16.0", "KiB", "-"]


def test_only_the_painter_adds_escapes() -> None:
    evil: list[Site] = [
        LinearSite("a\x1b[2J\nb.0.c", weight("w")),
        EmbeddingSite("\u202ee", weight("v")),
    ]
    made = Plan(TARGET, "gguf", "x\x1b.gguf", select(evil, (LINEAR, ROWS), TARGET), notes=("\x9b",))
    for width in (None, 40, 200):
        text = made.text(width)
        assert all(c.isprintable() or c == "\n" for c in text)
        assert r"a\x1b[2J\nb.0" in text
    seen: list[Style] = []

    def paint(style: Style, text: str) -> str:
        seen.append(style)
        return f"<{style}>{text}</>"

    assert "<bad>no kernel" in table(plan(), None, paint)
    assert "<warn>dequantized" in table(plan(policy="dequantize"), None, paint)
    assert set(seen) == {"title", "dim", "bad", "warn"}


def test_a_plan_without_sites() -> None:
    made = Plan(TARGET, "gguf", "empty.gguf", ())
    assert made.text(80).splitlines()[-1].split() == ["all", "sites", "0", "0", "B", "0", "B"]
    assert kernel_totals(()) == []


def test_totals_add_up() -> None:
    made = plan(LINEAR, ROWS)
    totals = kernel_totals(made.entries)
    assert sum(total.packed for total in totals) == made.bytes_after
    assert sum(total.stored for total in totals) == made.bytes_before
    assert sum(total.sites for total in totals) == len(sites())
    assert [total.shared for total in totals] == [0, 4096]


def test_sizes() -> None:
    sizes = [0, 1023, 1 << 10, (1 << 20) - 1, 1 << 20, 5 << 30]
    assert [size_text(size) for size in sizes] == [
        *("0 B", "1023 B", "1.0 KiB", "1024.0 KiB", "1.0 MiB", "5.0 GiB"),
    ]
