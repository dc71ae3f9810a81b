"""Some rows of a stored weight are those rows of the whole, wherever they start, in any order.

AWQ interleaves eight rows in a word: its layout gives multiples of eight and refuses the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.pack_awq import Awq, awq
from support.pack_compressed import Compressed, int_quantized, pack_quantized
from support.pack_float import fp8, mxfp4, nvfp4
from support.pack_gptq import Gptq, auto_round_config, gptq
from support.packers import Packed, write_folder

import qcompile
from qcompile.errors import LayoutError
from qcompile.weight import WeightRef

AUTO = auto_round_config("auto_round:auto_awq", Gptq(4, 32))
KINDS: dict[str, Callable[[], Packed]] = {
    "gptq2": lambda: gptq(48, 64, Gptq(2, 32)),
    "gptq3": lambda: gptq(48, 64, Gptq(3, 32)),
    "gptq4": lambda: gptq(48, 64, Gptq(4, 32, zeros="v1-gptqmodel")),
    "gptq8": lambda: gptq(48, 64, Gptq(8, -1)),
    "sym": lambda: gptq(48, 64, Gptq(4, 32, True, "absent")),
    "short group": lambda: gptq(48, 96, Gptq(4, 64)),
    "actorder": lambda: gptq(48, 64, Gptq(4, 32, order="permuted")),
    "awq": lambda: awq(48, 64, Awq(32)),
    "gemv": lambda: awq(48, 64, Awq(32, version="gemv")),
    "auto_round": lambda: awq(48, 64, Awq(32)).with_config(**AUTO),
    "pack3": lambda: pack_quantized(48, 64, Compressed(3, 32, symmetric=False)),
    "pack4": lambda: pack_quantized(48, 64, Compressed(4, 32, symmetric=False)),
    "words5": lambda: pack_quantized(48, 64, Compressed(5, 32, False, "words")),
    "g_idx": lambda: pack_quantized(48, 64, Compressed(4, 32, actorder="group")),
    "int8": lambda: int_quantized(48, 64, Compressed(8, -1, symmetric=False)),
    "fp8": lambda: fp8(48, 64),
    "tensor": lambda: fp8(48, 64, "tensor"),
    "block": lambda: fp8(48, 64, "block", (16, 32)),
    "mxfp4": lambda: mxfp4(48, 64),
    "nvfp4": lambda: nvfp4(48, 64),
}
SLICES = (slice(0, 48), slice(3, 11), slice(7, 8), slice(40, 48), slice(15, 33), slice(5, 5))
ORDERS = {
    "backwards": torch.arange(47, -1, -1),
    "some": torch.tensor([47, 0, 13, 13, 5]),
    "one": torch.tensor([9]),
    "heads": torch.arange(48).view(4, 2, 6).swapaxes(1, 2).reshape(-1),
}


def stored(tmp_path: Path, kind: str) -> tuple[WeightRef, torch.Tensor]:
    layer = KINDS[kind]()
    config = AUTO if kind == "auto_round" else None
    checkpoint = qcompile.open(write_folder(tmp_path / "model", {"0": layer}, config))
    return checkpoint.tensors["0.weight"], layer.exact


EIGHTS = ("awq", "auto_round")


@pytest.mark.parametrize("kind", KINDS)
def test_runs_of_rows(tmp_path: Path, kind: str) -> None:
    weight, exact = stored(tmp_path, kind)
    for rows in SLICES:
        if kind in EIGHTS and (rows.start % 8 or rows.stop % 8):
            with pytest.raises(LayoutError, match="multiples of 8"):
                weight.read(rows).dequantize()
            continue
        found = weight.read(rows)
        assert found.shape == tuple(exact[rows].shape), rows
        assert torch.equal(found.dequantize(), exact[rows]), rows


@pytest.mark.parametrize("kind", KINDS)
def test_rows_in_another_order(tmp_path: Path, kind: str) -> None:
    weight, exact = stored(tmp_path, kind)
    for name, order in ORDERS.items():
        if kind in EIGHTS:
            with pytest.raises(LayoutError, match="multiples of 8"):
                weight.read(order).dequantize()
            continue
        assert torch.equal(weight.read(order).dequantize(), exact[order]), name
        moved = weight.with_rows(order)
        assert torch.equal(moved.read(slice(0, 1)).dequantize(), exact[order][:1]), name
