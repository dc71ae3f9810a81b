"""Faults that users of other systems reported on Ascend, and the zero points that go wrong there.

The faults with groups, eight bits and quantized activations are in ``test_npu_models``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.folders import compiled, exact, pair, rows
from support.lowered import relative
from support.npu_experts import HALF, case, documented, kernel, layer, packed_for, run
from support.pack_awq import Awq, awq
from support.pack_gptq import Gptq, gptq
from support.packers import Packed, write_folder
from support.small import exact_copy, write_module
from support.zoo import relative_l2
from torch import nn

from qcompile import backends
from qcompile.backends.npu.layouts import DTYPES
from qcompile.cli import main
from qcompile.spec import AffineSpec

DEVICE = "npu:910b"
backends.load("npu").prepare()


def _gptq(folder: Path) -> tuple[Path, nn.Module]:
    layers: dict[str, Packed] = {
        "0": gptq(64, 64, Gptq(4, 32, sym=False, bias=True), 1),
        "1": gptq(32, 64, Gptq(4, 32, sym=False, bias=True), 2),
    }
    return write_folder(folder / "gptq", layers), exact(pair(), dict(layers))


def _awq(folder: Path) -> tuple[Path, nn.Module]:
    layers: dict[str, Packed] = {
        "0": awq(64, 64, Awq(32, bias=True), 1),
        "1": awq(32, 64, Awq(32, bias=True), 2),
    }
    return write_folder(folder / "awq", layers), exact(pair(), dict(layers))


def _gguf(folder: Path) -> tuple[Path, nn.Module]:
    path = write_module(folder / "m.gguf", pair(), {}, "Q4_0")
    return path, exact_copy(path, pair())


@pytest.mark.parametrize("make", [_gptq, _awq, _gguf])
def test_b109_formats_that_others_refuse(
    make: Callable[[Path], tuple[Path, nn.Module]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Every site becomes a vendor's operator, equal to the CPU's result; the command says which."""
    path, expected = make(tmp_path)
    x = rows()
    on_cpu = compiled(path, pair())(x)
    assert relative_l2(on_cpu, expected(x)) < 1e-5
    for dtype, bound in ((torch.float16, 3e-3), (torch.bfloat16, 2e-2)):
        made: Any = compiled(path, pair(), device=DEVICE, dtype=dtype, emulate=True)
        assert {e.runs_as for e in made.qcompile.plan.entries} == {"npu.linear_int4"}
        assert relative_l2(made(x.to(dtype)), on_cpu) < bound
    if path.is_dir():  # the file names no architecture, which the command needs
        assert main(["plan", str(path), "--device", DEVICE]) == 0
        said = capsys.readouterr().out
        assert said.count("npu.linear_int4") >= 2
        assert "no kernel" not in said


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_b111_four_experts_in_groups_of_128(dtype: torch.dtype) -> None:
    """One expert has no token. The emulator refuses counts that do not add up to the rows."""
    spec = AffineSpec(4, 128, "symmetric", torch.float16)
    weight = layer(spec, spec, ("gate", "up"), inner=128, hidden=256)
    packed = packed_for(dtype, weight)
    for tokens, skip in ((9, 2), (1, 0), (40, 3)):
        given = case(dtype, tokens, skip, inner=128, hidden=256)
        assert skip not in given["ids"]
        found = run(dtype, packed, given, wide=False)
        assert relative(found, documented(weight, given)) <= kernel(dtype).tolerance.relative_l2


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("stored", "order"), [("v1-gptqmodel", "trivial"), ("v2", "permuted")])
def test_zero_points_at_both_ends(bits: int, stored: Any, order: Any, tmp_path: Path) -> None:
    """0, which version 1 stores as 255 and reads as 255 + 1; and the largest code."""
    what = Gptq(bits, 32, sym=False, order=order, zeros=stored, bias=True)
    zeros = np.full((64, 8), (1 << bits) - 1)
    zeros[:, ::2] = 0
    layers: dict[str, Packed] = {"0": gptq(64, 256, what, zeros=zeros)}
    assert _both_ends(tmp_path, layers) < 2e-3


@pytest.mark.parametrize("bits", [4, 8])
def test_the_middle_zero_point_of_version_1(bits: int, tmp_path: Path) -> None:
    """127 + 1 overflows int8 elsewhere."""
    what = Gptq(bits, 32, sym=False, bias=True)
    zeros = np.full((64, 8), 1 << (bits - 1))
    assert _both_ends(tmp_path, {"0": gptq(64, 256, what, zeros=zeros)}) < 2e-3


def test_awq_zero_points_of_0_and_15(tmp_path: Path) -> None:
    zeros = np.zeros((64, 8), np.int64)
    zeros[1::2] = 15
    layers: dict[str, Packed] = {"0": awq(64, 256, Awq(32, bias=True), zeros=zeros)}
    assert _both_ends(tmp_path, layers) < 2e-3


def _both_ends(folder: Path, layers: dict[str, Packed]) -> float:
    path, x = write_folder(folder / "model", layers), rows(256)

    def fresh() -> nn.Sequential:
        return nn.Sequential(nn.Linear(256, 64))

    made = compiled(path, fresh(), device=DEVICE, dtype=HALF, emulate=True)
    return relative_l2(made(x.half()), exact(fresh(), dict(layers))(x))
