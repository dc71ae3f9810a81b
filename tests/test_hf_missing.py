"""``from_pretrained`` never quantizes values that no checkpoint gave."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.llama import llama_config
from support.zoo import DATA
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaForCausalLM,
)

import qcompile
from qcompile.errors import SchemeError

RTN: dict[str, Any] = {"scheme": "rtn", "bits": 8, "group_size": 32, "emitter": "eager"}


def test_a_quantized_folder_that_lost_its_settings(tmp_path: Path) -> None:
    folder = shutil.copytree(DATA / "gptq-w2-g32-asym", tmp_path / "model")
    (folder / "quantize_config.json").unlink()
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(SchemeError, match=r"no values for 28 parameters.*_proj\.weight"):
        AutoModelForCausalLM.from_pretrained(folder, quantization_config=qcompile.HFConfig(**RTN))


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_that_the_checkpoint_has_not(tmp_path: Path, tied: bool) -> None:
    torch.manual_seed(0)
    config = llama_config(num_hidden_layers=1, tie_word_embeddings=tied)
    source = LlamaForCausalLM(config)
    source.save_pretrained(tmp_path)
    given = {"quantization_config": qcompile.HFConfig(**RTN)}
    with pytest.raises(SchemeError, match=r"score\.weight"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path, **given)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, **given)  # nothing is missing
    assert "_adjust_missing_and_unexpected_keys" not in vars(model)
    assert torch.equal(model.lm_head.weight, source.lm_head.weight)
