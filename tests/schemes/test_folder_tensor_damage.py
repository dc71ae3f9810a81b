"""Tensors that are missing, too many, of the wrong shape or dtype, or that hold what cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.folders import agrees, checked, gptq_pair, pair, refusal, right_or_refused, rows
from support.pack_awq import Awq, awq
from support.pack_compressed import Compressed, int_quantized, pack_quantized
from support.pack_float import fp8, mxfp4, nvfp4
from support.pack_gptq import Gptq, gptq
from support.packers import Packed, write_folder
from torch import nn

import qcompile
from qcompile.errors import SchemeError

KINDS: dict[str, Packed] = {
    "gptq": gptq(64, 64, Gptq(4, 32, zeros="v2", bias=True)),
    "gptq3": gptq(64, 64, Gptq(3, 32, zeros="v2", bias=True)),
    "awq": awq(64, 64, Awq(32, bias=True)),
    "gemv": awq(64, 64, Awq(32, bias=True, version="gemv")),
    "pack": pack_quantized(64, 64, Compressed(4, 32, symmetric=False, bias=True)),
    "int": int_quantized(64, 64, Compressed(8, 32, symmetric=False, bias=True)),
    "fp8": fp8(64, 64),
    "block": fp8(64, 64, "block", (32, 32)),
    "mxfp4": mxfp4(64, 64),
    "nvfp4": nvfp4(64, 64),
}
PARTS = [(kind, part) for kind, layer in KINDS.items() for part in layer.tensors]
# A layer may do without these, or its meaning does not rest on them.
OPTIONAL = {("gptq", "g_idx"), ("gptq3", "g_idx"), ("pack", "weight_shape")}


def square(bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64, bias=bias))


def refused(tmp_path: Path, layer: Packed, *words: str, bias: bool = True) -> SchemeError:
    folder = write_folder(tmp_path / "model", {"0": layer})
    return refusal(folder, *words, make=lambda: square(bias))


def with_bias(kind: str) -> bool:
    return "bias" in KINDS[kind].tensors


@pytest.mark.parametrize(("kind", "part"), PARTS)
def test_a_missing_tensor(tmp_path: Path, kind: str, part: str) -> None:
    if (kind, part) in OPTIONAL:
        pytest.skip("the layer is whole without it")
    layer = KINDS[kind].without(part)
    # Without the codes nobody knows that there was a quantized layer: what is left of it is named.
    word = "" if part in ("qweight", "weight_packed") else part
    refused(tmp_path, layer, "0.", word, bias=with_bias(kind))


def taller(tensor: torch.Tensor) -> torch.Tensor:
    """One row too many."""
    plain = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
    return torch.cat([plain, plain[:1]]).view(tensor.dtype)


@pytest.mark.parametrize(("kind", "part"), PARTS)
def test_one_row_too_many(tmp_path: Path, kind: str, part: str) -> None:
    """The tensor, the shape it has and the shape it should have."""
    more = taller(KINDS[kind].tensors[part])
    layer = KINDS[kind].with_tensors(**{part: more})
    error = refused(tmp_path, layer, "0.", bias=with_bias(kind))
    if part not in ("qweight", "weight", "weight_packed", "g_idx", "weight_shape"):
        checked(error, part, str(tuple(more.shape)))  # the others say what the shape is


@pytest.mark.parametrize(("kind", "part"), PARTS)
def test_another_dtype(tmp_path: Path, kind: str, part: str) -> None:
    """Whole numbers where floats belong and the other way round."""
    tensor = KINDS[kind].tensors[part]
    integer = not tensor.dtype.is_floating_point or tensor.dtype.itemsize == 1
    other = torch.ones(tensor.shape, dtype=torch.float16 if integer else torch.int32)
    layer = KINDS[kind].with_tensors(**{part: other})
    refused(tmp_path, layer, f"0.{part}", bias=with_bias(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_too_many(tmp_path: Path, kind: str) -> None:
    layer = KINDS[kind].with_tensors(residual=torch.zeros(64, 8))
    refused(tmp_path, layer, "0.residual", bias=with_bias(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantized_layer_with_a_float_weight_too(tmp_path: Path, kind: str) -> None:
    """Two answers to what the weight is."""
    if "weight" in KINDS[kind].tensors:
        pytest.skip("its weight has that name already")
    layer = KINDS[kind].with_tensors(weight=torch.zeros(64, 64))
    refused(tmp_path, layer, "0.weight", bias=with_bias(kind))


def test_layers_that_no_parameter_uses(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", {**gptq_pair(), "2": gptq(64, 64, Gptq(4, 32))})
    refusal(folder, "2.weight")


def test_a_parameter_without_tensors(tmp_path: Path) -> None:
    layers = {name: layer for name, layer in gptq_pair().items() if name == "0"}
    refusal(write_folder(tmp_path / "model", layers), "1.weight", "1.bias")


def test_a_layer_of_another_size(tmp_path: Path) -> None:
    """The tensor's shape and the parameter's are both named."""
    layers = {**gptq_pair(), "1": gptq(64, 64, Gptq(4, 32, bias=True))}
    refusal(write_folder(tmp_path / "model", layers), "1.weight", "(64, 64)", "(32, 64)")


@pytest.mark.parametrize("value", [2, 77, -1, -(1 << 31), (1 << 31) - 1])
def test_columns_of_a_group_that_is_not_there(tmp_path: Path, value: int) -> None:
    layer = gptq(64, 64, Gptq(4, 32, order="permuted", bias=True))
    index = layer.tensors["g_idx"].clone()
    index[5] = value
    refused(tmp_path, layer.with_tensors(g_idx=index), "0.g_idx", str(value))
    with pytest.raises(SchemeError, match="g_idx"):
        qcompile.open(tmp_path / "model").dequantize("0.weight")


def test_columns_of_a_group_that_is_not_there_in_compressed_tensors(tmp_path: Path) -> None:
    layer = pack_quantized(64, 64, Compressed(4, 32, actorder="group", bias=True))
    index = layer.tensors["weight_g_idx"].clone()
    index[5] = 2
    refused(tmp_path, layer.with_tensors(weight_g_idx=index), "0.weight_g_idx", "2")


@pytest.mark.parametrize("shape", [[64, 63], [32, 64], [0, 64], [-64, 64], [64, 1 << 40], [64]])
def test_a_weight_shape_that_is_not_the_weights(tmp_path: Path, shape: list[int]) -> None:
    refused(tmp_path, KINDS["pack"].with_tensors(weight_shape=torch.tensor(shape)), "0.weight")


@pytest.mark.parametrize(("kind", "part"), PARTS)
def test_a_tensor_of_no_elements(tmp_path: Path, kind: str, part: str) -> None:
    """Only the zero points of a symmetric layer may be empty, and these layers have none."""
    empty = torch.zeros(0, dtype=KINDS[kind].tensors[part].dtype)
    layer = KINDS[kind].with_tensors(**{part: empty})
    refused(tmp_path, layer, "0.", bias=with_bias(kind))


def test_the_pair_is_good(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", gptq_pair())
    found = qcompile.open(folder)
    assert sorted(found.tensors) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert [weight.shape for weight in found.tensors.values()] == [
        tuple(pair().state_dict()[name].shape) for name in found.tensors
    ]


# **** tensors that contradict the settings: theirs is the value, or an error; never a third ****


def contradicted(tmp_path: Path, layer: Packed, *words: str) -> None:
    folder = write_folder(tmp_path / "model", {"0": layer})
    right_or_refused(folder, lambda: square("bias" in layer.tensors), {"0": layer}, *words)


def with_weights(layer: Packed, **keys: Any) -> Packed:
    """The same tensors under other ``weights`` of the config group."""
    group = layer.config["config_groups"]["group_0"]
    weights = {**group["weights"], **keys}
    return layer.with_config(config_groups={"group_0": {**group, "weights": weights}})


def test_awq_zero_points_that_should_not_be_there(tmp_path: Path) -> None:
    contradicted(tmp_path, KINDS["awq"].with_config(zero_point=False), "zero")


@pytest.mark.parametrize("kind", ["pack", "int"])
def test_zero_points_of_a_symmetric_layer(tmp_path: Path, kind: str) -> None:
    contradicted(tmp_path, with_weights(KINDS[kind], symmetric=True), "zero")


@pytest.mark.parametrize("kind", ["pack", "int"])
def test_zero_points_of_nothing(tmp_path: Path, kind: str) -> None:
    """A symmetric layer may come with zero points of 0."""
    zeros = {
        "pack": torch.full((8, 2), -0x77777778, dtype=torch.int32),  # 0x88888888
        "int": torch.zeros(64, 2, dtype=torch.int8),
    }[kind]
    make = pack_quantized if kind == "pack" else int_quantized
    layer = make(64, 64, Compressed(4 if kind == "pack" else 8, 32, bias=True))
    layer = layer.with_tensors(weight_zero_point=zeros)
    folder = write_folder(tmp_path / "model", {"0": layer})
    agrees(folder, square, {"0": layer}, rows())


@pytest.mark.parametrize("bits", [2, 4, 7])
def test_whole_numbers_that_are_too_large(tmp_path: Path, bits: int) -> None:
    """int8 weights that need all their bits, and a config that says fewer."""
    contradicted(tmp_path, with_weights(KINDS["int"], num_bits=bits), "0.")


def test_gptq_order_that_the_config_denies(tmp_path: Path) -> None:
    """``g_idx`` decides, whatever ``desc_act`` says."""
    layer = gptq(64, 64, Gptq(4, 32, order="permuted", bias=True)).with_config(desc_act=False)
    contradicted(tmp_path, layer)
    plain = gptq(64, 64, Gptq(4, 32, bias=True)).with_config(desc_act=True)
    contradicted(tmp_path, plain)
