"""Kernels compiled ahead of time: no binary of a selection breaks a rule, and every rule bites."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.aot_job import SELECTIONS, selected
from support.zoo import zoo_entry

import qcompile
from qcompile.backends.cuda import aot, prebuilt, probe
from qcompile.backends.cuda.ahead import Binary, compiling
from qcompile.backends.cuda.aot import Row, budget, violated
from qcompile.backends.cuda.configs import SHARED
from qcompile.backends.cuda.sass import Figures, main_loop, parse
from qcompile.backends.cuda.shipped import (
    CHOICES,
    CROWDED,
    ROWS,
    SPECS,
    Case,
    ExpertsCase,
    RowsCase,
    shipped,
)
from qcompile.errors import OptionError

TESTS = Path(__file__).parents[2]
HAS_TRITON = importlib.util.find_spec("triton") is not None
NEEDS_TRITON = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")


def own_process(*command: str, **more: str) -> str:
    """What a Python process says in which Triton compiles."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1", **more}
    full = [sys.executable, "-W", "error", *command]
    done = subprocess.run(full, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@NEEDS_TRITON
@pytest.mark.parametrize("number", range(SELECTIONS))
def test_no_binary_breaks_a_rule(number: int) -> None:
    said = own_process("-m", "support.aot_job", str(number))
    rows = [json.loads(line) for line in said.splitlines()]
    assert len(rows) == len(list(selected(number))) > 15
    assert [(row["case"], row["arch"], row["broken"]) for row in rows if row["broken"]] == []
    products = [row for row in rows if row["tile"]]
    assert all(row["loop"] > 50 and row["per_weight"] > 1.5 for row in products)


def test_the_selections_have_every_kind() -> None:
    chosen = [pair for number in range(SELECTIONS) for pair in selected(number)]
    assert {arch for arch, _ in chosen} == set(aot.ARCHITECTURES)
    assert {case.name for _, case in chosen} == set(SPECS)
    assert len({(arch, str(case)) for arch, case in chosen}) == len(chosen)
    everything = {str(case) for case in shipped()}
    assert {str(case) for _, case in chosen} <= everything
    assert len(everything) == 2 * (7 * len(SPECS) + 10 + 2 * len(CHOICES) + len(CROWDED))


@NEEDS_TRITON
def test_launches_on_a_device_find_the_binaries(tmp_path: Path) -> None:
    """A second process compiles nothing: the cache is found by what a launch asks for."""
    job = (
        "import json, sys, torch\n"
        "from pathlib import Path\n"
        "from triton import knobs\n"
        "from qcompile.backends.cuda import prebuilt\n"
        "from qcompile.backends.cuda.shipped import SPECS, Case\n"
        "hits = []\n"
        "knobs.compilation.listener = lambda **said: hits.append(said['cache_hit'])\n"
        "cases = [Case('w4 g128', SPECS['w4 g128'], (1024, 2048), m, torch.float16)"
        " for m in json.loads(sys.argv[2])]\n"
        "prebuilt.build('sm90', cases, Path(sys.argv[1]))\n"
        "print(json.dumps(hits))\n"
    )
    first = json.loads(own_process("-c", job, str(tmp_path), "[1, 40]"))
    # Of both one binary, and one that adds the parts.
    assert first == [False] * len(first)
    assert len(first) >= 3
    again = json.loads(own_process("-c", job, str(tmp_path), "[7, 33]"))
    assert again == [True] * len(first)
    manifest = json.loads((tmp_path / "qcompile.json").read_text())
    assert manifest["arch"] == "sm90"
    assert {kernel["name"] for kernel in manifest["kernels"]} == {"linear", "reduce_parts"}


def test_what_a_plan_launches() -> None:
    plan = qcompile.plan(str(TESTS / "data" / "gguf-q2_k.gguf"), device="cuda:sm90")
    cases = list(prebuilt.cases_of(plan))
    shapes = {(case.spec, case.shape) for case in cases if isinstance(case, Case)}
    assert len(shapes) == 7  # of 29 linears
    assert len(cases) == 1 + len(shapes) * (len(ROWS) + 1)
    assert all(case.dtype == torch.bfloat16 for case in cases)
    [lookup] = [case for case in cases if isinstance(case, RowsCase) and case.gather]
    assert lookup.shape == (2048, 256)


def test_what_a_plan_launches_for_experts() -> None:
    """Blocks of every height, and every number of parts that any number of tokens leads to."""
    entry = zoo_entry("moe-gguf-q4_k_m", "gguf", "moe")
    plan = qcompile.plan(entry.path, device="cuda:sm90", dtype=torch.float16)
    cases = [case for case in prebuilt.cases_of(plan) if isinstance(case, ExpertsCase)]
    for spec in {case.spec for case in cases}:
        one = next(case for case in cases if case.spec == spec)
        tiles = {replace(one, choices=n).tile("sm90") for n in range(1, 1500)}
        assert tiles <= {case.tile("sm90") for case in cases if case.spec == spec}
        assert {tile.rows for tile in tiles if tile} == {8, 16, 32, 64, 128}
    assert {case.shape for case in cases} == {(8, 768, 256)}


# **** rules ****

LOOP = """
    /*0100*/  LDGSTS.E.BYPASS.128 [R1], desc[UR32][R6.64], !P1 ;
    /*0110*/  LDSM.16.M88.4 R24, [R2] ;
    /*0120*/  LOP3.LUT R24, R24, 0xf000f, R3, 0xea, !PT ;
    /*0130*/  HGMMA.64x8x16.F32 R36, R24, gdesc[UR20], R36 ;
    /*0140*/  @P1 BRA 0x100 ;
    /*0150*/  EXIT ;
    /*0160*/  BRA 0x160;
"""


def row_of(listing: str = LOOP, copies: int = 8, products: int = 32, **more: Any) -> Row:
    """A binary of 4 bits in groups of 128 whose loop has this many copies and products."""
    lines = []
    for line in listing.strip().splitlines():
        times = copies if "LDGSTS" in line else products if "MMA" in line else 1
        lines += [line] * times
    code = tuple(parse("\n".join(lines)))
    figures = Figures(100, more.get("stack", 0), more.get("local", 0), code, main_loop(code))
    spec = SPECS[more.get("name", "w4 g128")]
    rows, dtype = more.get("rows", 1), more.get("dtype", torch.float16)
    case = Case("here", spec, (4096, 4096), rows, dtype)
    binary = Binary("linear", b"", more.get("shared", 1000), 4, (1, 1, 1))
    return Row(case, more.get("arch", "sm90"), binary, figures)


def test_a_binary_that_keeps_every_rule() -> None:
    row = row_of()
    assert violated(row) == []
    assert row.turns == 1.0
    assert row.weights == 128 * 256
    assert row.per_weight == len(row.figures.loop) * 128 / (128 * 256)
    assert row_of(products=64).turns == 2.0


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (row_of(stack=16), "nothing may spill: stack 16, local 0"),
        (row_of(local=8), "nothing may spill: stack 0, local 8"),
        (row_of(shared=232449), "shared memory must fit: 232449 bytes, sm90 has 232448"),
        (row_of(arch="sm89", shared=101377), "shared memory must fit: 101377 bytes, sm89 has"),
        (row_of(LOOP.replace("HGMMA", "FFMA")), "no matrix instruction in a loop"),
        (row_of(LOOP.replace("HGMMA", "HMMA"), rows=64, products=256), "HMMA in a tile of 64"),
        (row_of(LOOP.replace("R24, gdesc", "gdesc[UR2], gdesc")), "decoded in registers"),
        (
            row_of(LOOP.replace("HGMMA.64x8x16.F32 R36, R24", "UTCHMMA gdesc[UR4]"), arch="sm100"),
            "decoded in registers",
        ),
        (
            row_of(LOOP.replace("HGMMA", "HMMA").replace("LDSM", "LDS"), arch="sm80"),
            "HMMA without LDSM",
        ),
        (row_of(LOOP.replace("LOP3.LUT", "I2F.F16")), "must not be converted: 1 I2F"),
        (row_of(LOOP.replace("BYPASS.128", "64")), "0 of 8 copies of weights have"),
        (row_of(copies=7), "7 of 8 copies of weights have"),
        (row_of(LOOP + "", products=32, copies=800), "instructions per weight must fit: 3."),
    ],
)
def test_every_rule_bites(row: Row, text: str) -> None:
    said = violated(row)
    assert any(text in line for line in said), said


def test_budgets() -> None:
    half, narrow = torch.float16, torch.bfloat16
    wanted = {
        ("w4 g128", half, 1): 2.8,
        ("w4 g64", half, 32): 2.8,
        ("w4 row", half, 1): 2.8,
        ("w4 g32 q4_0", half, 1): 3.5,
        ("w4 g128", narrow, 16): 3.4,
        ("w4 g32 offset q4_k", narrow, 1): 4.1,
        ("w4 g128", half, 64): None,
        ("nf4 g64", half, 1): None,
        ("w8 g128", half, 1): None,
        ("w5 g32 offset q5_k", half, 1): None,
    }
    for (name, dtype, rows), limit in wanted.items():
        found = budget(row_of(name=name, dtype=dtype, rows=rows))
        assert found == (None if limit is None else pytest.approx(limit))


def test_rows_are_not_products() -> None:
    case = RowsCase("here", SPECS["w6 g16 q6_k"], (64, 256), True, torch.float16)
    row = replace(row_of(LOOP.replace("HGMMA", "FFMA")), case=case)
    assert violated(row) == []
    assert row.per_weight == 0.0
    assert violated(replace(row, figures=replace(row.figures, stack=8)))


def test_the_main_loop() -> None:
    assert [one.name for one in main_loop(parse(LOOP))][-1] == "BRA"
    assert len(main_loop(parse(LOOP))) == 5
    behind = LOOP + "    /*0170*/  BRA 0x110 ;\n"  # a wait that lies behind the code
    assert len(main_loop(parse(behind))) == 5
    assert main_loop(parse("/*0100*/  HMMA R1, R2 ;\n/*0110*/  BRA 0x100 ;")) != ()
    assert main_loop(parse("/*0100*/  HMMA R1, R2 ;\n/*0110*/  BRA 0x120 ;")) == ()


def test_every_architecture_has_a_limit() -> None:
    assert set(aot.ARCHITECTURES) < set(SHARED)
    for case in shipped():
        tiles = [case.tile(arch) for arch in SHARED]
        assert all(tile is None or tile.stages >= 2 for tile in tiles)


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "missing_triton", lambda: "the package triton is not installed")
    with pytest.raises(OptionError, match="triton is not installed"), compiling("sm90"):
        pass
    monkeypatch.setattr(probe, "missing_triton", lambda: None)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(OptionError, match="TRITON_INTERPRET is 1"), compiling("sm90"):
        pass
