"""Reported faults of formats and configs: the right value, or an error that says what is wrong.

The numbers are those of the collection of faults: B01 to B19. A missing shard (B15) is in
``test_folder_damage.py``.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.folders import (
    agrees,
    checked,
    compiled,
    exact,
    gptq_pair,
    pair,
    refusal,
    right_or_refused,
    rows,
)
from support.llama import check_llama, llama_config, llama_layers, write_llama
from support.pack_awq import Awq, awq
from support.pack_compressed import (
    Compressed,
    compressed_config,
    integer_weights,
    pack_quantized,
)
from support.pack_gptq import Gptq, Zeros, gptq
from support.packers import Config, Packed, write_folder
from support.zoo import relative_l2
from torch import nn

import qcompile
from qcompile.errors import SchemeError

Pair = dict[str, Packed | torch.Tensor]
DEVICES = ("cpu", "cuda:sm90", "npu:910b")


def linear(n: int, k: int, bias: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(k, n, bias=bias))


def test_b01_zeros_of_version_1_and_2(tmp_path: Path) -> None:
    """The same matrix written with z - 1 and with z."""
    full = np.random.default_rng(0).integers(0, 16, (64, 1))
    stored: list[tuple[Zeros, Any]] = [
        ("v2", full),
        ("v1-gptqmodel", full),
        ("v1", np.maximum(full, 1)),
        ("v2", np.maximum(full, 1)),
    ]
    found = []
    for number, (zeros, given) in enumerate(stored):
        layer = gptq(64, 128, Gptq(4, 128, zeros=zeros), zeros=given)
        folder = write_folder(tmp_path / str(number), {"0": layer})
        found.append(qcompile.open(folder).dequantize("0.weight"))
        assert torch.equal(found[-1], layer.exact)
        agrees(folder, lambda: linear(64, 128), {"0": layer}, rows(128))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[2], found[3])


def test_b03_only_the_old_config(tmp_path: Path) -> None:
    """As AutoGPTQ wrote it: no quant_method, the file named by the config."""
    layers = gptq_pair(Gptq(4, 64, bias=True))
    folder = write_folder(tmp_path / "model", layers)
    old = {
        "bits": 4,
        "group_size": 64,
        "damp_percent": 0.01,
        "desc_act": False,
        "static_groups": False,
        "sym": False,
        "true_sequential": True,
        "model_name_or_path": "x",
        "model_file_base_name": "gptq_model-4bit-64g",
    }
    (folder / "quantize_config.json").write_text(json.dumps(old))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").rename(folder / "gptq_model-4bit-64g.safetensors")
    agrees(folder, pair, layers, rows())


def test_b03_two_configs_that_agree(tmp_path: Path) -> None:
    layers = gptq_pair(Gptq(4, 64, bias=True))
    folder = write_folder(tmp_path / "model", layers)
    config = Gptq(4, 64).config
    (folder / "quantize_config.json").write_text(json.dumps(config))
    agrees(folder, pair, layers, rows())
    (folder / "quantize_config.json").write_text(json.dumps({**config, "group_size": 128}))
    refusal(folder, "config.json", "quantize_config.json", "group_size", "64", "128")


def test_b03_the_old_config_of_awq(tmp_path: Path) -> None:
    layers: Pair = {"0": awq(64, 64, Awq(32, bias=True)), "1": awq(32, 64, Awq(32, bias=True))}
    folder = write_folder(tmp_path / "model", layers)
    old = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
    (folder / "quant_config.json").write_text(json.dumps(old))
    agrees(folder, pair, layers, rows())
    (folder / "config.json").write_text('{"model_type": "llama"}')
    agrees(folder, pair, layers, rows())


DYNAMIC: Config = {
    "-:.*\\.layers\\.1\\..*": {},
    "+:.*down_proj": {"bits": 8, "group_size": 32},
    ".*o_proj": {"group_size": 64},
}


def dynamic_layer(name: str, n: int, k: int, seed: int) -> Packed | None:
    if ".layers.1." in name or name == "lm_head":
        return None
    if "down_proj" in name:
        return gptq(n, k, Gptq(8, 32), seed)
    return gptq(n, k, Gptq(4, 64 if "o_proj" in name else 128), seed)


def test_b05_rules_for_single_modules(tmp_path: Path) -> None:
    config = llama_config(hidden_size=128, intermediate_size=192)
    layers = llama_layers(config, dynamic_layer)
    base = {**Gptq(4, 128).config, "dynamic": DYNAMIC}
    folder = write_llama(tmp_path / "model", config, layers, base)
    check_llama(folder, config, layers)
    specs = {name: str(w.spec) for name, w in qcompile.open(folder).tensors.items()}
    first = "model.layers.0"
    assert specs[f"{first}.mlp.down_proj.weight"].startswith("uint8 g32")
    assert specs[f"{first}.self_attn.o_proj.weight"].startswith("uint4 g64")
    assert specs[f"{first}.self_attn.q_proj.weight"].startswith("uint4 g128")
    assert {specs[n] for n in specs if "layers.1." in n} == {"bfloat16"}
    explained = qcompile.plan(folder).explain(f"{first}.mlp.down_proj")
    assert "uint8 g32" in explained


@pytest.mark.parametrize(
    "rules",
    [
        {"+:0": {"bits": 8}, "-:1": {}},  # a later skip is moved to the front
        {"-:1": {}, "0": {"bits": 8}, "+:0": {"bits": 2}},  # the first that matches
        {"+:0": {"bits": 8}, "-:[1-9]": {}},
    ],
    ids=["skip", "first", "class"],
)
def test_b05_order_of_rules(tmp_path: Path, rules: Config) -> None:
    layers: Pair = {
        "0": gptq(64, 64, Gptq(8, 32, bias=True)),
        "1.weight": torch.randn(32, 64).bfloat16(),
        "1.bias": torch.randn(32).bfloat16(),
    }
    config = {**Gptq(4, 32).config, "dynamic": rules}
    agrees(write_folder(tmp_path / "model", layers, config), pair, layers, rows())


def test_b05_a_rule_that_skips_what_is_quantized(tmp_path: Path) -> None:
    layers = gptq_pair()
    config = {**Gptq(4, 32).config, "dynamic": {"-:0": {}}}
    folder = write_folder(tmp_path / "model", layers, config)
    right_or_refused(folder, pair, layers, "0")


class Seeing(nn.Module):
    """A visual part that is not to be converted, and a part that is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.visual = nn.ModuleDict({"proj": nn.Linear(64, 64)})
        self.text = nn.Linear(64, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.text(self.visual["proj"](x))
        return out


def test_b07_modules_that_are_not_converted(tmp_path: Path) -> None:
    layers: Pair = {
        "visual.proj.weight": torch.randn(64, 64).bfloat16(),
        "visual.proj.bias": torch.randn(64).bfloat16(),
        "text": awq(32, 64, Awq(32)),
    }
    config = {**Awq(32).config, "modules_to_not_convert": ["visual"]}
    folder = write_folder(tmp_path / "model", layers, config)
    agrees(folder, Seeing, layers, rows())
    for device in DEVICES:
        plan = qcompile.plan(Seeing(), device, checkpoint=folder, on_unsupported="dequantize")
        assert [entry.site.name for entry in plan.entries] == ["text"]


class Blocks(nn.Module):
    """Two blocks, a router and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(64, 64, bias=False), "router": nn.Linear(64, 64)})
            for _ in range(2)
        )
        self.lm_head = nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            assert isinstance(layer, nn.ModuleDict)
            x = layer["up"](x) * torch.sigmoid(layer["router"](x))
        out: torch.Tensor = self.lm_head(x)
        return out


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("first", ["re:.*layers\\.0\\..*", "layers.0.up"])
def test_b09_a_name_is_stronger_than_a_class(tmp_path: Path, first: str, swapped: bool) -> None:
    eight, four = Compressed(8, -1), Compressed(4, 32)
    layers: Pair = {
        "layers.0.up": pack_quantized(64, 64, eight),
        "layers.1.up": pack_quantized(64, 64, four),
        "lm_head.weight": torch.randn(64, 64).bfloat16(),
    }
    for block in range(2):
        layers[f"layers.{block}.router.weight"] = torch.randn(64, 64).bfloat16()
        layers[f"layers.{block}.router.bias"] = torch.randn(64).bfloat16()
    targets = [([first], integer_weights(eight)), (["Linear"], integer_weights(four))]
    groups = {f"group_{i}": pair for i, pair in enumerate(targets[::-1] if swapped else targets)}
    config = compressed_config("pack-quantized", groups, ("lm_head", "re:.*router$"))
    folder = write_folder(tmp_path / "model", layers, config)
    agrees(folder, Blocks, layers, rows())
    tensors = qcompile.open(folder).tensors
    assert str(tensors["layers.0.up.weight"].spec).startswith("uint8 g64")
    assert str(tensors["layers.1.up.weight"].spec).startswith("uint4 g32")


def test_b11_gemv_is_not_read_as_gemm(tmp_path: Path) -> None:
    layers: Pair = {"0": awq(64, 256, Awq(64, version="gemv"))}
    folder = write_folder(tmp_path / "model", layers)
    right_or_refused(folder, lambda: linear(64, 256), layers, "gemv")


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_b13_zero_points_that_are_empty_or_absent(tmp_path: Path, bits: int) -> None:
    kinds: tuple[Zeros, ...] = ("empty", "absent", "v1")
    layers: Pair = {
        str(i): gptq(64, 64, Gptq(bits, 32, True, zeros)) for i, zeros in enumerate(kinds)
    }

    def three() -> nn.Sequential:
        return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))

    agrees(write_folder(tmp_path / "model", layers), three, layers, rows())


def test_b17_a_bias_of_zeros_for_a_layer_without(tmp_path: Path) -> None:
    layers: Pair = {
        name: layer.with_tensors(bias=torch.zeros(64, dtype=torch.float16))
        for name, layer in {"0": gptq(64, 64, Gptq(4, 32)), "1": gptq(64, 64, Gptq(4, 32))}.items()
    }

    def two() -> nn.Sequential:
        return nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))

    folder = write_folder(tmp_path / "model", layers)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = compiled(folder, two())
        found = model(rows())
    assert len([w for w in caught if "bias" in str(w.message)]) <= 1
    plain: Pair = {name: gptq(64, 64, Gptq(4, 32)) for name in layers}
    assert relative_l2(found, exact(two(), plain)(rows())) < 1e-5


def test_b17_a_bias_of_numbers_for_a_layer_without(tmp_path: Path) -> None:
    """Applied, or refused by name; never dropped."""
    layers: Pair = {"0": gptq(64, 64, Gptq(4, 32, bias=True))}
    folder = write_folder(tmp_path / "model", layers)
    try:
        found = compiled(folder, linear(64, 64))(rows())
    except SchemeError as error:
        checked(error, "0.bias")
        return
    assert relative_l2(found, exact(linear(64, 64, bias=True), layers)(rows())) < 1e-5


def test_b19_signed_zero_points(tmp_path: Path) -> None:
    layers: Pair = {"0": pack_quantized(72, 128, Compressed(4, 64, symmetric=False))}
    folder = write_folder(tmp_path / "model", layers)
    agrees(folder, lambda: linear(72, 128), layers, rows(128))
    zeros = layers["0"].tensors["weight_zero_point"]  # type: ignore[union-attr]
    assert zeros.shape == (9, 2)
