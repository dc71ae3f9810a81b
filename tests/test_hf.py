import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.gguf_writer import tiny_model, write_model

from qcompile.errors import OptionError, SchemeError
from qcompile.hf import build_skeleton, need_transformers
from qcompile.schemes import open_checkpoint

TOKENS = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": [*(f"<{index}>" for index in range(93)), "a", "b", "ab"],
    "tokenizer.ggml.token_type": [1] * 96,
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eot_token_id": 7,
}


def test_a_skeleton_has_buffers_and_no_weights() -> None:
    source = tiny_model("gemma3")
    model = build_skeleton(source.config, torch.bfloat16)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not model.training
    from transformers import AutoModelForCausalLM

    full = AutoModelForCausalLM.from_config(source.config, dtype=torch.bfloat16)
    expected = dict(full.named_buffers())
    found = dict(model.named_buffers())
    assert set(found) == set(expected)
    for name, buffer in found.items():
        assert buffer.dtype == expected[name].dtype
        assert torch.equal(buffer, expected[name])
    head, embedding = model.get_parameter("lm_head.weight"), "model.embed_tokens.weight"
    assert head is model.get_parameter(embedding)


def test_an_untied_skeleton_has_two_matrices() -> None:
    model = build_skeleton(tiny_model("llama").config, torch.float32)
    head, embedding = model.get_parameter("lm_head.weight"), "model.embed_tokens.weight"
    assert head is not model.get_parameter(embedding)


def test_a_file_gives_model_tokenizer_and_weights(tmp_path: Path) -> None:
    source = tiny_model("qwen2", tie_word_embeddings=True)
    path = write_model(tmp_path / "m.gguf", "qwen2", source, metadata=TOKENS)
    checkpoint = open_checkpoint(path)
    model, tokenizer = checkpoint.build(torch.bfloat16)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    weights = checkpoint.catalogue(shapes)
    assert set(weights) == {name for name, _ in source.named_parameters()}
    assert model.generation_config.eos_token_id == [2, 7]  # type: ignore[union-attr]
    assert tokenizer.eos_token == "<2>"  # type: ignore[attr-defined]
    assert tokenizer.tokenize("ab") == ["ab"]  # type: ignore[attr-defined]
    for name, values in source.named_parameters():
        assert torch.equal(weights[name].dequantize(), values)


def test_a_file_without_tokenizer_is_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", "qwen2", tiny_model("qwen2"))
    with pytest.raises(SchemeError, match=r"tokenizer\.ggml\.model is None"):
        open_checkpoint(path).build(torch.float32)


@pytest.mark.parametrize("missing", ["transformers", "accelerate"])
def test_a_missing_package_names_the_extra(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(OptionError) as caught:
        need_transformers("load")
    assert f"the package {missing} is not installed" in str(caught.value)
    assert "qcompile[hf]" in str(caught.value)


def test_planning_needs_no_transformers(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", "qwen3", tiny_model("qwen3"))
    code = (
        "import sys\n"
        "from qcompile.schemes.gguf.model import model_sites, model_weights\n"
        "from qcompile.schemes.gguf.reader import GGUFFile\n"
        f"file = GGUFFile.open({str(path)!r})\n"
        "model_sites(file), model_weights(file)\n"
        "print('transformers' in sys.modules, 'gguf' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
