"""``save_pretrained`` and its kin on compiled models of transformers."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.llama import IDS, llama_config
from support.zoo import DATA, relative_l2
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import qcompile
from qcompile.errors import OptionError


@pytest.fixture(scope="module")
def model() -> Any:
    torch._dynamo.reset()
    torch.manual_seed(0)
    source = LlamaForCausalLM(llama_config(num_hidden_layers=1)).eval()
    return qcompile.optimize(source, scheme="rtn", bits=4, group_size=32, emitter="eager")


def again(folder: Path) -> Any:
    config = qcompile.HFConfig(emitter="eager")
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)


def test_what_is_saved_is_what_is_loaded(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    loaded = again(tmp_path / "saved")
    assert loaded.config.quantization_config["quant_method"] == "gptq"
    assert relative_l2(loaded(IDS).logits, model(IDS).logits) < 1e-6
    loaded.save_pretrained(tmp_path / "twice")  # one that from_pretrained made
    assert torch.equal(again(tmp_path / "twice")(IDS).logits, loaded(IDS).logits)
    with pytest.raises(OptionError, match="not empty"):
        model.save_pretrained(tmp_path / "saved")
    model.save_pretrained(tmp_path / "saved", overwrite=True)


def test_weights_that_no_format_holds(tmp_path: Path) -> None:
    model: Any = qcompile.load(DATA / "gguf-q2_k.gguf", emitter="eager")[0]
    with pytest.raises(OptionError, match="embeddings and experts are not written"):
        model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"push_to_hub": True}, "push_to_hub=True"),
        ({"state_dict": {}}, "state_dict"),
        ({"variant": "fp16"}, "variant"),
        ({"safe_serialization": False}, "safe_serialization"),
        ({"max_shard_size": "5 elephants"}, "no size"),
        ({"max_shard_size": None}, "no size"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_arguments(model: Any, tmp_path: Path, options: dict[str, Any], match: str) -> None:
    with pytest.raises(OptionError, match=match):
        model.save_pretrained(tmp_path / "saved", **options)
    assert not (tmp_path / "saved").exists()


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "deepcopy": (copy.deepcopy, "copied or pickled"),
    "a part": (lambda model: copy.deepcopy(model.model.layers[0]), "copied or pickled"),
    "save": (lambda model: torch.save(model, io.BytesIO()), "copied or pickled"),
    "save state": (lambda model: torch.save(model.state_dict(), io.BytesIO()), "saved"),
    "half": (lambda model: model.half(), "converted or moved"),
    "half of a part": (lambda model: model.model.half(), "converted or moved"),
    "to dtype": (lambda model: model.to(torch.bfloat16), "converted or moved"),
    "to device": (lambda model: model.to("meta"), "converted or moved"),
    "push": (lambda model: model.push_to_hub("somebody/model"), "not uploaded"),
    "dequantize": (lambda model: model.dequantize(), "no floats to go back to"),
    "resize": (lambda model: model.resize_token_embeddings(200), "in their shapes"),
}


@pytest.mark.parametrize("call", REFUSED)
def test_refused(model: Any, call: str) -> None:
    before = model(IDS).logits
    action, match = REFUSED[call]
    with pytest.raises(OptionError, match=match):
        action(model)
    assert torch.equal(model(IDS).logits, before)


def test_calls_that_change_nothing(model: Any) -> None:
    before = model(IDS).logits
    assert model.float().to("cpu").to(torch.float32).eval().cpu() is model
    assert model.model.float() is model.model
    assert torch.equal(model(IDS).logits, before)
