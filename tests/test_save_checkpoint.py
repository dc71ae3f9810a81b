"""Quantized models written as GPTQ folders, and read back: by us, and by GPTQModel."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.saved import (
    IDS,
    config_of,
    decoded,
    llama,
    load,
    quantized,
    safetensors_torch,
    stored,
    transformers,
    weights_of,
)
from torch import nn

import qcompile
from qcompile.errors import OptionError
from qcompile.layout import QuantizedTensor

FORMATS = ("gptq", "gptq_v2")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "options",
    [
        {"bits": 4, "group_size": 32},
        {"bits": 8, "group_size": -1},
        {"bits": 3, "group_size": 32},
        {"bits": 2, "group_size": 16, "desc_act": True},
        {"bits": 4, "group_size": 48},
        {"bits": 4, "group_size": 32, "lm_head": True, "skip": [r".*\.1\.mlp\..*"]},
    ],
)
def test_what_is_written_is_what_was_quantized(
    tmp_path: Path, options: dict[str, Any], format: Any
) -> None:
    model = quantized(llama(), **options)
    folder = qcompile.save_checkpoint(model, tmp_path / "m", format)
    weights, tensors = weights_of(model), stored(folder)
    for name, weight in weights.items():
        path = name.removesuffix(".weight")
        found = decoded(tensors, path, options["bits"], int(format == "gptq"))
        assert torch.equal(found, weight), name
    opened = qcompile.open(folder)
    assert opened.scheme == "gptq"
    for name, weight in weights.items():
        assert torch.equal(opened.dequantize(name), weight), name
    floats = {n: p for n, p in model.state_dict().items() if n not in weights}
    assert floats
    assert all(torch.equal(tensors[name], value) for name, value in floats.items())


def test_the_folder_runs_as_the_model_did(tmp_path: Path) -> None:
    model = quantized(llama(), bits=4, group_size=32, desc_act=True)
    folder = qcompile.save_checkpoint(model, tmp_path / "m")
    with torch.no_grad():
        assert torch.allclose(load(folder)(IDS).logits, model(IDS).logits, atol=1e-5)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_asymmetric_weights_in_the_second_format(tmp_path: Path, bits: int) -> None:
    model = quantized(llama(), bits=bits, group_size=16, sym=False)
    folder = qcompile.save_checkpoint(model, tmp_path / "m", "gptq_v2")
    opened, tensors = qcompile.open(folder), stored(folder)
    for name, weight in weights_of(model).items():
        assert torch.equal(opened.dequantize(name), weight)
        assert torch.equal(decoded(tensors, name.removesuffix(".weight"), bits, 0), weight)


def test_the_format_follows_the_zero_points(tmp_path: Path) -> None:
    for sym, format in ((True, "gptq"), (False, "gptq_v2")):
        model = quantized(nn.Sequential(nn.Linear(64, 32)).eval(), group_size=32, sym=sym)
        folder = qcompile.save_checkpoint(model, tmp_path / format)
        settings = json.loads((folder / "quantize_config.json").read_text())
        assert settings["checkpoint_format"] == format


def _asymmetric(low: int, width: int = 64) -> Any:
    """A model of one linear whose zero points are from ``low`` up."""
    model: Any = nn.Sequential(nn.Linear(width, 32)).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        model[0].weight.uniform_(-1, 1)
    quantized(model, bits=4, group_size=32, sym=False)
    session: Any = model.qcompile
    weight = session.catalogue["0.weight"].load()
    zeros = weight.parts["zeros"].clone()
    zeros.copy_(torch.arange(zeros.numel()).reshape(zeros.shape) % (16 - low) + low)
    parts = dict(weight.parts) | {"zeros": zeros}
    weight = QuantizedTensor(weight.spec, weight.layout, weight.shape, parts)
    reference = session.catalogue["0.weight"]
    object.__setattr__(reference, "read", weight.take_rows)
    return model


def test_zero_points_of_0_are_refused_in_the_first_format(tmp_path: Path) -> None:
    model = _asymmetric(0)
    with pytest.raises(OptionError, match=r"0: 4 zero points are 0.*\n.*\n.*gptq_v2"):
        qcompile.save_checkpoint(model, tmp_path / "m", "gptq")
    assert list(tmp_path.iterdir()) == []
    folder = qcompile.save_checkpoint(model, tmp_path / "m", "gptq_v2")
    name = "0.weight"
    assert torch.equal(qcompile.open(folder).dequantize(name), weights_of(model)[name])


def test_other_zero_points_read_the_same_by_every_rule(tmp_path: Path) -> None:
    model = _asymmetric(1)
    with pytest.warns(UserWarning, match="GPTQModel takes them only as format='gptq_v2'"):
        folder = qcompile.save_checkpoint(model, tmp_path / "m", "gptq")
    weight, tensors = weights_of(model)["0.weight"], stored(folder)
    assert torch.equal(decoded(tensors, "0", 4, 1), weight)
    # GPTQModel's rule: one addition to the whole word.
    whole = tensors["0.qzeros"].numpy().view(np.uint32) + np.uint32(0x11111111)
    tensors["0.qzeros"] = torch.from_numpy(whole.view(np.int32).copy())
    assert torch.equal(decoded(tensors, "0", 4, 0), weight)
    assert torch.equal(qcompile.open(folder).dequantize("0.weight"), weight)


def test_settings_say_what_each_module_is(tmp_path: Path) -> None:
    model = quantized(llama(), bits=4, group_size=32, desc_act=True, skip=[r".*\.0\.mlp\.up_proj"])
    folder = qcompile.save_checkpoint(model, tmp_path / "m")
    settings = json.loads((folder / "quantize_config.json").read_text())
    assert settings == config_of(folder)["quantization_config"]
    wanted = {
        "bits": 4, "group_size": 32, "sym": True, "desc_act": True, "lm_head": False,
        "quant_method": "gptq", "checkpoint_format": "gptq", "pack_dtype": "int32",
    }  # fmt: skip
    assert {key: settings[key] for key in wanted} == wanted
    assert settings["meta"]["quantizer"] == [f"qcompile:{qcompile.__version__}"]
    assert settings["dynamic"] == {r"-:^model\.layers\.0\.mlp\.up_proj$": {}}
    assert config_of(folder)["architectures"] == ["LlamaForCausalLM"]
    assert config_of(folder)["dtype"] == "float32"


def test_settings_of_modules_that_differ(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 64), nn.Linear(64, 32)).eval()
    quantized(model, bits=4, group_size=64)  # the second and third have one group each
    folder = qcompile.save_checkpoint(model, tmp_path / "m")
    settings = json.loads((folder / "quantize_config.json").read_text())
    assert settings["group_size"] == -1
    assert settings["dynamic"] == {"+:^0$": {"bits": 4, "group_size": 64}}
    opened = qcompile.open(folder)
    for name, weight in weights_of(model).items():
        assert torch.equal(opened.dequantize(name), weight)


def test_shards_and_their_index(tmp_path: Path) -> None:
    model = quantized(llama(), bits=4, group_size=32)
    folder = qcompile.save_checkpoint(model, tmp_path / "m", shard_bytes=30_000)
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found: dict[str, str] = {}
    total = 0
    for name in files:
        tensors = safetensors_torch.load_file(folder / name)
        found |= dict.fromkeys(tensors, name)
        size = sum(tensor.nbytes for tensor in tensors.values())
        assert size <= 30_000 or len(tensors) == 1
        total += size
    assert index["weight_map"] == found
    assert index["metadata"]["total_size"] == total
    whole = stored(qcompile.save_checkpoint(model, tmp_path / "whole"))
    assert {n: t.tolist() for n, t in stored(folder).items()} == {
        n: t.tolist() for n, t in whole.items()
    }
    opened = qcompile.open(folder)
    for name, weight in weights_of(model).items():
        assert torch.equal(opened.dequantize(name), weight)


def test_a_tied_head_is_written_once(tmp_path: Path) -> None:
    model = quantized(llama(tie_word_embeddings=True), bits=4, group_size=32)
    folder = qcompile.save_checkpoint(model, tmp_path / "m")
    assert "lm_head.weight" not in stored(folder)
    again = load(folder)
    assert torch.allclose(again(IDS).logits, model(IDS).logits, atol=1e-5)


def test_gpt2_is_written_as_linears(tmp_path: Path) -> None:
    config = transformers.GPT2Config(
        vocab_size=128, n_embd=96, n_layer=1, n_head=4, n_positions=64, bos_token_id=1,
        eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval()
    quantized(model, bits=4, group_size=32, skip=[r".*c_fc"])
    tensors = stored(qcompile.save_checkpoint(model, tmp_path / "m"))
    path = "transformer.h.0.attn.c_attn"
    assert tensors[f"{path}.qweight"].shape == (12, 288)
    assert torch.equal(decoded(tensors, path, 4, 1), weights_of(model)[f"{path}.weight"])
    assert tensors["transformer.h.0.mlp.c_fc.weight"].shape == (96, 384)  # as GPT-2 has it


def test_a_gptq_folder_can_be_written_again(tmp_path: Path) -> None:
    first = quantized(llama(), bits=4, group_size=32, desc_act=True)
    folder = qcompile.save_checkpoint(first, tmp_path / "a", "gptq")
    second = load(folder)
    other = qcompile.save_checkpoint(second, tmp_path / "b", "gptq_v2")
    opened = qcompile.open(other)
    for name, weight in weights_of(first).items():
        assert torch.equal(opened.dequantize(name), weight)


class Words:
    """A tokenizer as far as saving goes."""

    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")


def test_the_tokenizer_and_modes_of_files(tmp_path: Path) -> None:
    model = quantized(llama(), bits=4, group_size=32)
    folder = qcompile.save_checkpoint(model, tmp_path / "deep" / "m", tokenizer=Words())
    assert (folder / "tokenizer.json").exists()
    assert (folder / "generation_config.json").exists()
    mask = os.umask(0)
    os.umask(mask)
    assert folder.stat().st_mode & 0o777 == 0o777 & ~mask
    assert (folder / "model.safetensors").stat().st_mode & 0o777 == 0o666 & ~mask
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["m"]


# **** GPTQModel ****

_READER = """
import sys, torch
from gptqmodel import BACKEND, GPTQModel
for folder in sys.argv[1:]:
    model = GPTQModel.load(folder, device="cpu", backend=BACKEND.GPTQ_TORCH, dtype=torch.float16)
    weights = {
        name: module.dequantize_weight().T.contiguous()
        for name, module in model.model.named_modules() if hasattr(module, "dequantize_weight")
    }
    torch.save(weights, folder + "/read.pt")
"""


def _tokenizer() -> Any:
    """Any tokenizer: GPTQModel loads none of our models without one."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "word": 3}
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "<pad>"))
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, **names)


def _gptqmodel_python() -> str:
    """A Python that has GPTQModel: its own environment, since it wants other releases of torch."""
    named = os.environ.get("QCOMPILE_GPTQMODEL_PYTHON")
    if not named:
        pytest.skip("set QCOMPILE_GPTQMODEL_PYTHON to a Python with gptqmodel installed")
    return named


def test_gptqmodel_reads_the_same_values(tmp_path: Path) -> None:
    python = _gptqmodel_python()
    cases: dict[str, dict[str, Any]] = {
        "a": {"bits": 4, "group_size": 32},
        "b": {"bits": 2, "group_size": 32, "sym": False, "format": "gptq_v2"},
        "c": {"bits": 3, "group_size": 32, "desc_act": True, "skip": [r".*\.1\.self_attn\..*"]},
        "d": {"bits": 8, "group_size": -1, "lm_head": True},
        "e": {"bits": 4, "group_size": 32, "sym": False, "desc_act": True, "format": "gptq_v2"},
    }
    expected: dict[str, dict[str, torch.Tensor]] = {}
    for name, case in cases.items():
        format = case.pop("format", "gptq")
        model = quantized(llama(), **case)
        qcompile.save_checkpoint(model, tmp_path / name, format, tokenizer=_tokenizer())
        expected[name] = weights_of(model)
    folders = [str(tmp_path / name) for name in cases]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    environment.pop("PYTHONPATH", None)
    ran = subprocess.run(
        [python, "-c", _READER, *folders], env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    for name, weights in expected.items():
        read = torch.load(tmp_path / name / "read.pt")
        assert {f"{path}.weight" for path in read} == set(weights)
        for path, found in read.items():
            # It multiplies in float16: our values, rounded once.
            assert torch.equal(found, weights[f"{path}.weight"].to(torch.float16)), (name, path)
