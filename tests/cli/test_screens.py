"""What commands print fits the terminal, and says the same thing once."""

from __future__ import annotations

import pytest
from support.zoo import DATA

from qcompile.cli import main

FILE = str(DATA / "gguf-q2_k.gguf")
REFUSED = ("plan", FILE, "--device", "npu:310p")


@pytest.mark.parametrize("columns", [80, 200])
@pytest.mark.parametrize(
    "arguments",
    [
        ("doctor",),
        REFUSED,
        (*REFUSED, "--explain", "lm_head"),
        ("plan", FILE, "--explain", "lm_head"),
    ],
    ids=" ".join,
)
def test_lines_fit(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    columns: int,
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(list(arguments)) == 0
    lines = capsys.readouterr().out.splitlines()
    # Paths have no place to break at.
    assert [line for line in lines if len(line) > columns and "/" not in line] == []


def test_kernels_that_refuse_alike_share_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(list(REFUSED)) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if " x npu." in line]
    reasons = [line.partition(": ")[2] for line in said]
    assert said[0].startswith("    28 x npu.linear_int4_t, npu.linear_int4: npu_weight_quant")
    counts = [line.split(" x ")[0] for line in said]
    assert len(set(zip(counts, reasons, strict=True))) == len(said)


def test_an_explanation_is_one_line_a_kernel_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*REFUSED, "--explain", "lm_head"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("[ ]" in line for line in lines) == len(lines) - 2
