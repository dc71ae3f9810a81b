"""Heads that are tied, stored twice, or missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.zoo import zoo_entry

import qcompile
from qcompile.errors import SchemeError


@pytest.fixture(scope="module")
def source() -> Path:
    return zoo_entry("gptq-w4-g128-sym", "gptq:gptq", "dense").path


def folder_with(source: Path, to: Path, tied: bool, head: str) -> Path:
    """A copy of a checkpoint: the head ``own``, a ``copy`` of the embedding, or ``none``."""
    import json

    to.mkdir()
    config = json.loads((source / "config.json").read_text())
    config["tie_word_embeddings"] = tied
    (to / "config.json").write_text(json.dumps(config))
    tensors = load_file(str(source / "model.safetensors"))
    if head == "copy":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    if head == "none":
        del tensors["lm_head.weight"]
    save_file(tensors, str(to / "model.safetensors"))
    return to


def logits(folder: Path) -> torch.Tensor:
    torch._dynamo.reset()
    model: Any = qcompile.load(folder, emitter="eager")[0]
    found: torch.Tensor = model(torch.arange(5)[None]).logits
    return found


def test_a_copy_and_a_tie_are_the_same(source: Path, tmp_path: Path) -> None:
    tied = logits(folder_with(source, tmp_path / "tied", True, "none"))
    copied = logits(folder_with(source, tmp_path / "copied", True, "copy"))
    untied = logits(folder_with(source, tmp_path / "untied", False, "copy"))
    assert torch.equal(tied, copied)
    assert torch.equal(tied, untied)


def test_a_head_of_its_own_is_used_whatever_the_configuration_says(
    source: Path, tmp_path: Path
) -> None:
    own = logits(folder_with(source, tmp_path / "own", False, "own"))
    assert torch.equal(own, logits(folder_with(source, tmp_path / "said", True, "own")))


def test_a_missing_head_names_both_remedies(source: Path, tmp_path: Path) -> None:
    folder = folder_with(source, tmp_path / "none", False, "none")
    with pytest.raises(SchemeError, match=r"lm_head\.weight[\s\S]*tie_word_embeddings"):
        qcompile.load(folder)


def test_a_tied_module_takes_a_checkpoint_with_a_copy(source: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig, LlamaForCausalLM

    folder = folder_with(source, tmp_path / "copied", True, "copy")
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    module: Any = LlamaForCausalLM(config).eval()
    compiled = qcompile.optimize(module, checkpoint=folder, emitter="eager")
    assert compiled.lm_head.weight is compiled.model.embed_tokens.weight
    own = folder_with(source, tmp_path / "own", True, "own")
    with pytest.raises(SchemeError, match="ties together"):
        qcompile.optimize(LlamaForCausalLM(config).eval(), checkpoint=own)
