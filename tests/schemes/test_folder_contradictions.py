"""Settings that say nothing, or say one thing while the tensors or another key say another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.pack_compressed import Compressed, pack_quantized
from support.pack_gptq import Gptq, gptq
from support.packers import Packed, write_folder

import qcompile
from qcompile.errors import SchemeError

Layers = dict[str, Packed | torch.Tensor]


def permuted() -> Layers:
    what = Gptq(4, 32, order="permuted")
    return {"0": gptq(64, 64, what, seed=1), "1": gptq(64, 64, what, seed=2)}


def without(layers: Layers, *names: str) -> Layers:
    """The layers without their tensor ``names``, written ``LAYER.TENSOR``."""
    kept: Layers = {}
    for path, layer in layers.items():
        assert isinstance(layer, Packed)
        tensors = {n: t for n, t in layer.tensors.items() if f"{path}.{n}" not in names}
        kept[path] = Packed(tensors, layer.exact, layer.config)
    return kept


def exact(layers: Layers, path: str) -> torch.Tensor:
    layer = layers[path]
    assert isinstance(layer, Packed)
    return torch.as_tensor(layer.exact)


@pytest.mark.parametrize("key", ["checkpoint_format", "meta", "sym", "group_size"])
def test_null_in_one_file_does_not_hide_the_other(tmp_path: Path, key: str) -> None:
    layers: Layers = {"0": gptq(64, 64, Gptq(4, 32, zeros="v2"), seed=1)}
    folder = write_folder(tmp_path / "model", layers)
    path = folder / "config.json"
    config: dict[str, Any] = json.loads(path.read_text())
    settings = config["quantization_config"]
    (folder / "quantize_config.json").write_text(json.dumps(settings))
    config["quantization_config"] = {**settings, key: None}
    path.write_text(json.dumps(config))
    assert torch.equal(qcompile.open(folder).dequantize("0.weight"), exact(layers, "0"))


def test_one_index_of_several_is_missing(tmp_path: Path) -> None:
    layers = permuted()
    first = layers["0"]
    assert isinstance(first, Packed)
    config = {**first.config, "desc_act": True}
    folder = write_folder(tmp_path / "model", without(layers, "1.g_idx"), config)
    with pytest.raises(SchemeError, match=r"1\.g_idx"):
        qcompile.open(folder)


def test_no_index_at_all_is_told(tmp_path: Path) -> None:
    """Readers of the format then take columns in order; the plan says so."""
    layers: Layers = {"0": gptq(64, 64, Gptq(4, 32, order="absent"), seed=1)}
    first = layers["0"]
    assert isinstance(first, Packed)
    config = {**first.config, "desc_act": True}
    opened = qcompile.open(write_folder(tmp_path / "model", layers, config))
    assert torch.equal(opened.dequantize("0.weight"), exact(layers, "0"))
    assert any("g_idx" in note for note in opened.notes())


def test_two_formats_in_one_file(tmp_path: Path) -> None:
    layers = permuted()
    first = layers["0"]
    assert isinstance(first, Packed)
    config = {**first.config, "checkpoint_format": "gptq", "format": "gptq_v2"}
    with pytest.raises(SchemeError, match="gptq and gptq_v2"):
        qcompile.open(write_folder(tmp_path / "model", layers, config))


def test_an_order_by_group_without_its_index(tmp_path: Path) -> None:
    layers: Layers = {"0": pack_quantized(64, 64, Compressed(4, 32, actorder="group"))}
    folder = write_folder(tmp_path / "model", without(layers, "0.weight_g_idx"))
    with pytest.raises(SchemeError, match="weight_g_idx"):
        qcompile.open(folder)


@pytest.mark.parametrize("bits", [4.0, True, "4"])
def test_a_width_that_is_no_whole_number(tmp_path: Path, bits: Any) -> None:
    layers: Layers = {"0": pack_quantized(64, 64, Compressed(4, 32))}
    folder = write_folder(tmp_path / "model", layers)
    config = json.loads((folder / "config.json").read_text())
    [group] = config["quantization_config"]["config_groups"].values()
    group["weights"]["num_bits"] = bits
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(SchemeError, match="num_bits"):
        qcompile.open(folder)
