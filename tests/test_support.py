"""The tables of ``docs/schemes.md`` say what the planner says, for everything schemes store."""

from __future__ import annotations

import pytest

from qcompile import backends, layout, schemes, support
from qcompile.errors import OptionError
from qcompile.storable import STORED
from qcompile.target import ARCHITECTURES, Target

# Layouts that belong to no scheme.
FRAME = {"affine", "lookup", "scaled", "float", "experts"}


@pytest.fixture(autouse=True)
def _compiler() -> None:
    if backends.load("cpu").compiler() == "eager":
        pytest.skip("without a C++ compiler every CPU kernel refuses")


def test_the_page_is_what_the_kernels_answer() -> None:
    page = support.PAGE.read_text(encoding="utf-8")
    assert support.rewritten(page) == page, f"docs/schemes.md is out of date: {support.COMMAND}"


def test_every_scheme_and_every_layout_of_one_is_listed() -> None:
    assert set(STORED) == set(schemes._BUILT_IN)
    for name in STORED:
        schemes.scheme_of(name)
    owned = {n for n in layout._LAYOUTS if n.partition(".")[0] not in ARCHITECTURES} - FRAME
    listed = {row.layout for rows in STORED.values() for row in rows()}
    assert owned - listed == set()
    assert {Target.parse(name).kind for name in support.TARGETS} == set(ARCHITECTURES)


def test_a_page_without_markers_is_an_error() -> None:
    with pytest.raises(OptionError, match="support: gguf"):
        support.rewritten("# Schemes")


def test_an_option_that_is_none_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert support.main(["--wriet"]) == 2
    assert "--wriet" in capsys.readouterr().err


def test_cells_are_the_plan_s() -> None:
    rows = {row.label: row for row in STORED["gguf"]()}
    linear = support.site_of(rows["`iq1_m`"], "linear")
    assert support.answer(linear, Target.parse("cpu:avx2")) == "`cpu.panel_linear`"
    refused = support.answer(linear, Target.parse("cuda:sm90"))
    assert refused.startswith("refused (groups of 8 columns;")
    assert refused.endswith(", runs requantized")
    mixture = support.site_of(rows["`q8_0`"], "experts")
    assert support.answer(mixture, Target.parse("npu:910b")) == "`npu.experts`~"
