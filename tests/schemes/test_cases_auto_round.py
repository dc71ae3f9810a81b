"""AutoRound folders whose layers differ from the base settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.folders import agrees, pair, right_or_refused, rows
from support.llama import check_llama, llama_config, llama_layers, write_llama
from support.pack_gptq import Gptq, auto_round_config, gptq
from support.packers import Packed, write_folder

import qcompile

Pair = dict[str, Packed | torch.Tensor]
BASE = Gptq(4, 32, zeros="v2", bias=True)
EIGHT = Gptq(8, 64, zeros="v2", bias=True)


def floats(n: int, k: int) -> Pair:
    return {"1.weight": torch.randn(n, k).bfloat16(), "1.bias": torch.randn(n).bfloat16()}


@pytest.mark.parametrize(
    "extra",
    [
        {"0": {"bits": 8, "group_size": 64}, "1": {"bits": 16}},
        {"0": {"bits": 8, "group_size": 64}, "1": {"bits": 16, "data_type": "float"}},
        {"0": {"bits": 8, "group_size": 64}, "1": {"bits": 16, "data_type": "fp"}},
        {"^0$": {"bits": 8, "group_size": 64}, "1": {"bits": 16}},
    ],
    ids=["keys", "data_type", "fp", "pattern"],
)
def test_layers_that_differ(tmp_path: Path, extra: dict[str, Any]) -> None:
    """``extra_config`` holds the keys that differ; 16 bits leave a layer float."""
    layers: Pair = {"0": gptq(64, 64, EIGHT), **floats(32, 64)}
    config = {**auto_round_config("auto_round", BASE), "extra_config": extra}
    agrees(write_folder(tmp_path / "model", layers, config), pair, layers, rows())


def test_a_layer_that_is_float_without_a_word(tmp_path: Path) -> None:
    layers: Pair = {"0": gptq(64, 64, BASE), **floats(32, 64)}
    config = auto_round_config("auto_round", BASE)
    right_or_refused(write_folder(tmp_path / "model", layers, config), pair, layers, "1.weight")


def test_a_layer_that_should_be_float_and_is_not(tmp_path: Path) -> None:
    layers: Pair = {"0": gptq(64, 64, BASE), "1": gptq(32, 64, BASE)}
    config = {**auto_round_config("auto_round", BASE), "extra_config": {"1": {"bits": 16}}}
    right_or_refused(write_folder(tmp_path / "model", layers, config), pair, layers, "1")


def test_symmetric_layers_in_an_asymmetric_folder(tmp_path: Path) -> None:
    layers: Pair = {
        "0": gptq(64, 64, Gptq(4, 32, True, "v2", bias=True)),
        "1": gptq(32, 64, BASE),
    }
    config = {**auto_round_config("auto_round", BASE), "extra_config": {"0": {"sym": True}}}
    agrees(write_folder(tmp_path / "model", layers, config), pair, layers, rows())


def test_a_head_of_its_own(tmp_path: Path) -> None:
    """A whole model: layers in 4 bits, one projection in 8, the head in 8 by its own rule."""
    model = llama_config()

    def pack(name: str, n: int, k: int, seed: int) -> Packed | None:
        eight = name == "lm_head" or name.endswith("0.mlp.down_proj")
        return gptq(n, k, Gptq(8 if eight else 4, 32, zeros="v2"), seed)

    layers = llama_layers(model, pack)
    config = {
        **auto_round_config("auto_round", BASE),
        "block_name_to_quantize": "model.layers",
        "extra_config": {
            "lm_head": {"bits": 8},
            "model.layers.0.mlp.down_proj": {"bits": 8},
        },
    }
    folder = write_llama(tmp_path / "model", model, layers, config)
    check_llama(folder, model, layers)
    assert str(qcompile.open(folder).tensors["lm_head.weight"].spec).startswith("uint8 g32")
