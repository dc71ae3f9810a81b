"""Configs that are no config, contradict each other or the tensors, or say what is not supported.

A key that changes what the weights mean is never passed over in silence.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.folders import agrees, checked, gptq_pair, pair, refusal, rows
from support.pack_awq import Awq, awq
from support.pack_compressed import Compressed, compressed_config, integer_weights, pack_quantized
from support.pack_gptq import Gptq, auto_round_config
from support.packers import Config, Packed, write_folder

import qcompile
from qcompile.errors import SchemeError

Pair = dict[str, Packed | torch.Tensor]


def folder_of(tmp_path: Path, layers: Pair, **keys: Any) -> Path:
    first = layers["0"]
    assert isinstance(first, Packed)
    return write_folder(tmp_path / "model", layers, {**first.config, **keys})


def gptq_folder(tmp_path: Path, **keys: Any) -> Path:
    return folder_of(tmp_path, gptq_pair(), **keys)


def auto_round_folder(tmp_path: Path, **keys: Any) -> Path:
    config = auto_round_config("auto_round:auto_gptq", Gptq(4, 32))
    return write_folder(tmp_path / "model", gptq_pair(), {**config, **keys})


def awq_pair() -> Pair:
    what = Awq(32, bias=True)
    return {"0": awq(64, 64, what, seed=1), "1": awq(32, 64, what, seed=2)}


def compressed_pair(what: Compressed | None = None) -> Pair:
    given = what or Compressed(4, 32, bias=True)
    return {"0": pack_quantized(64, 64, given, seed=1), "1": pack_quantized(32, 64, given, seed=2)}


# **** no config ****


@pytest.mark.parametrize(
    "content",
    ["", "{", "not json", "[]", "null", '"gptq"', "{'bits': 4}", "[" * 100_000, '{"a": 1}{"b": 2}'],
    ids=lambda text: text[:16] or "empty",
)
def test_a_config_that_is_no_json_object(tmp_path: Path, content: str) -> None:
    folder = gptq_folder(tmp_path)
    (folder / "config.json").write_text(content, encoding="utf-8")
    refusal(folder, "config.json")


def test_a_config_in_another_encoding(tmp_path: Path) -> None:
    folder = gptq_folder(tmp_path)
    (folder / "config.json").write_bytes(b'\xff\xfe{"quantization_config": {}}')
    refusal(folder, "config.json")


@pytest.mark.parametrize("value", ["gptq", [], 4, None, {}], ids=repr)
def test_a_quantization_config_that_is_none(tmp_path: Path, value: Any) -> None:
    folder = gptq_folder(tmp_path)
    (folder / "config.json").write_text(json.dumps({"quantization_config": value}))
    refusal(folder, "quantization_config")


def test_a_folder_of_a_float_model(tmp_path: Path) -> None:
    folder = gptq_folder(tmp_path)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    refusal(folder, "quantization_config")


def test_no_config_at_all(tmp_path: Path) -> None:
    folder = gptq_folder(tmp_path)
    (folder / "config.json").unlink()
    refusal(folder)


# **** two configs ****


@pytest.mark.parametrize(
    ("key", "value"),
    [("group_size", 64), ("bits", 8), ("sym", True), ("checkpoint_format", "gptq_v2")],
)
def test_two_configs_that_differ(tmp_path: Path, key: str, value: Any) -> None:
    """Whichever of the two fits the tensors: nobody can tell which one is meant."""
    config = Gptq(4, 32).config
    for at_home in (True, False):
        folder = gptq_folder(tmp_path, **({} if at_home else {key: value}))
        other = {**config, key: value} if at_home else config
        (folder / "quantize_config.json").write_text(json.dumps(other))
        refusal(folder, "config.json", "quantize_config.json", key)


def test_a_scheme_that_is_not_the_folders(tmp_path: Path) -> None:
    refusal(gptq_folder(tmp_path), "gptq", "awq", scheme="awq")


# **** values ****

BAD_VALUES: list[tuple[str, Any]] = [
    ("bits", 1),
    ("bits", 9),
    ("bits", 0),
    ("bits", "4"),
    ("bits", 4.5),
    ("bits", True),
    ("bits", None),
    ("bits", [4]),
    ("group_size", 0),
    ("group_size", -2),
    ("group_size", "32"),
    ("group_size", 16.5),
    ("sym", "false"),
    ("checkpoint_format", "marlin"),
    ("checkpoint_format", "bitblas"),
    ("checkpoint_format", "gptq_p"),
    ("checkpoint_format", "gptq_v9"),
    ("checkpoint_format", 2),
    ("pack_dtype", "int16"),
    ("pack_dtype", "int8"),
    ("pack_dtype", "int64"),
    ("is_marlin_format", True),
    ("dynamic", ["-:.*"]),
    ("dynamic", {"+:[": {"bits": 8}}),
    ("dynamic", {"+:.*": {"bits": 9}}),
    ("dynamic", {"+:.*": 8}),
    ("quant_method", "gptqq"),
    ("quant_method", "hqq"),
    ("quant_method", "bitsandbytes"),
    ("quant_method", 4),
]


@pytest.mark.parametrize(("key", "value"), BAD_VALUES, ids=repr)
def test_a_value_that_cannot_be(tmp_path: Path, key: str, value: Any) -> None:
    """Refused by name: the key, and the value where it is a word."""
    refusal(gptq_folder(tmp_path, **{key: value}), key, value if isinstance(value, str) else "")


@pytest.mark.parametrize(
    ("key", "value"),
    [("group_size", 64), ("group_size", 16), ("group_size", -1), ("bits", 8), ("bits", 2)],
)
def test_a_value_that_the_tensors_contradict(tmp_path: Path, key: str, value: int) -> None:
    refusal(gptq_folder(tmp_path, **{key: value}), "0.")


def test_a_mistyped_method_has_a_hint(tmp_path: Path) -> None:
    refusal(gptq_folder(tmp_path, quant_method="gptqq"), "gptqq", "'gptq'")


@pytest.mark.parametrize("key", ["bits", "group_size"])
def test_a_key_that_must_be_there(tmp_path: Path, key: str) -> None:
    config = {name: value for name, value in Gptq(4, 32).config.items() if name != key}
    refusal(write_folder(tmp_path / "model", gptq_pair(), config), key)


@pytest.mark.parametrize("version", ["marlin", "exllama", "gemv_fast", "llm-awq", "gemmm", 1])
def test_awq_versions_that_are_not_read(tmp_path: Path, version: Any) -> None:
    refusal(folder_of(tmp_path, awq_pair(), version=version), "version", str(version))


def test_awq_of_other_widths(tmp_path: Path) -> None:
    refusal(folder_of(tmp_path, awq_pair(), bits=8), "bits", "8")


@pytest.mark.parametrize("packing", ["mlx", "auto_round:fake", "auto_roundd", 7])
def test_auto_round_packings_that_are_not_read(tmp_path: Path, packing: Any) -> None:
    refusal(auto_round_folder(tmp_path, packing_format=packing), "packing_format", str(packing))


@pytest.mark.parametrize(
    ("key", "value"), [("data_type", "mx_fp"), ("data_type", "nv_fp"), ("super_bits", 6)]
)
def test_auto_round_types_that_are_not_read(tmp_path: Path, key: str, value: Any) -> None:
    refusal(auto_round_folder(tmp_path, **{key: value}), key, str(value))


# **** what is not known ****


def noted_or_refused(folder: Path, key: str) -> None:
    """An unknown key stands in the notes, or there is an error that names it."""
    try:
        notes = qcompile.open(folder).notes()
    except SchemeError as error:
        checked(error, key)
    else:
        assert any(key in note for note in notes), f"{key} is passed over: {notes}"


@pytest.mark.parametrize(
    ("key", "value"),
    [("rotation", "hadamard"), ("frobnicate", 3), ("residual_bits", 2), ("super_group_size", 8)],
)
def test_a_key_that_nobody_knows(tmp_path: Path, key: str, value: Any) -> None:
    for name, layers in {
        "gptq": gptq_pair(),
        "awq": awq_pair(),
        "ct": compressed_pair(),
    }.items():
        noted_or_refused(folder_of(tmp_path / name, layers, **{key: value}), key)
    noted_or_refused(auto_round_folder(tmp_path / "ar", **{key: value}), key)


def test_an_unknown_key_of_an_override(tmp_path: Path) -> None:
    noted_or_refused(gptq_folder(tmp_path, dynamic={"+:1": {"residual_bits": 2}}), "residual_bits")


def test_harmless_keys_are_not_refused(tmp_path: Path) -> None:
    layers = gptq_pair()
    keys = {
        "damp_percent": 0.01,
        "static_groups": False,
        "true_sequential": True,
        "model_name_or_path": None,
        "model_file_base_name": "model",
        "pack_dtype": "int32",
        "lm_head": False,
        "meta": {"quantizer": "optimum:1.16", "uri": "x", "damp_percent": 0.1},
    }
    agrees(folder_of(tmp_path, layers, **keys), pair, layers, rows())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("transform_config", {"config_groups": {"u": {"type": "hadamard", "apply": []}}}),
        ("sparsity_config", {"format": "sparse-24-bitmask", "targets": ["Linear"]}),
        ("format", "marlin-24"),
        ("format", "sparse-bitmask"),
        ("format", "pack-quantizd"),
    ],
)
def test_compressed_tensors_of_other_kinds(tmp_path: Path, key: str, value: Any) -> None:
    layers: Pair = {
        name: _with_format(layer, str(value)) if key == "format" else layer
        for name, layer in compressed_pair().items()
        if isinstance(layer, Packed)
    }
    refusal(
        folder_of(tmp_path, layers, **{key: value}),
        key,
        "marlin-24" if value == "marlin-24" else "",
    )


def _with_format(layer: Packed, format: str) -> Packed:
    groups = layer.config["config_groups"]
    changed = {name: {**group, "format": format} for name, group in groups.items()}
    return layer.with_config(config_groups=changed)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_bits", 9),
        ("num_bits", "4"),
        ("type", "complex"),
        ("strategy", "diagonal"),
        ("group_size", 24),
        ("group_size", 0),
        ("symmetric", False),
        ("dynamic", True),
        ("num_bits", 8),
    ],
)
def test_compressed_weights_that_cannot_be(tmp_path: Path, key: str, value: Any) -> None:
    """``symmetric`` false without zero points, groups and widths that the tensors do not have."""
    config = compressed_config("pack-quantized", weights_of(**{key: value}))
    refusal(write_folder(tmp_path / "model", compressed_pair(), config))


def weights_of(**keys: Any) -> dict[str, tuple[list[str], Config]]:
    return {"group_0": (["Linear"], {**integer_weights(Compressed(4, 32)), **keys})}


def test_a_layer_that_no_group_targets(tmp_path: Path) -> None:
    weights = integer_weights(Compressed(4, 32))
    config = compressed_config("pack-quantized", {"g": (["re:.*expert"], weights)})
    refusal(write_folder(tmp_path / "model", compressed_pair(), config), "0")


def test_the_folders_that_are_spoiled_above_are_good(tmp_path: Path) -> None:
    agrees(gptq_folder(tmp_path), pair, gptq_pair(), rows())
    for name, layers in {"awq": awq_pair(), "ct": compressed_pair()}.items():
        agrees(folder_of(tmp_path / name, layers), pair, layers, rows())
