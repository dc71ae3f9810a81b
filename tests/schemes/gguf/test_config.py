import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.gguf_writer import CONFIGS, HEAD_DIM, tiny_model, write_model
from torch import nn

from qcompile.errors import SchemeError
from qcompile.hf import build_skeleton
from qcompile.schemes.gguf.config import build_config, build_generation_config
from qcompile.schemes.gguf.model import catalogue
from qcompile.schemes.gguf.reader import GGUFFile
from qcompile.schemes.gguf.values import read_configuration

ZOO = Path(__file__).parents[4] / "shared" / "zoo"
DENSE = ("gguf-iq4_xs", "gguf-mxfp4-mixed", "gguf-potpourri", "gguf-q2_k", "gguf-q4_k_m")
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 50000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0],
    "attention_factor": 1.25,
    "original_max_position_embeddings": 16,
    "factor": 16.0,
}


def _filled(file: GGUFFile) -> nn.Module:
    """The model that the file describes, with the file's weights in float32."""
    config = build_config(file)
    config._attn_implementation = "eager"
    model = build_skeleton(config, torch.float32)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    weights = {name: ref.dequantize() for name, ref in catalogue(file, shapes).items()}
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()  # type: ignore[operator]
    assert not [name for name, parameter in model.named_parameters() if parameter.is_meta]
    return model


def _logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(ids).logits
    return logits


def _same_logits(source: nn.Module, path: Path) -> None:
    ids = torch.randint(0, 96, (2, 40), generator=torch.Generator().manual_seed(0))
    expected, found = _logits(source, ids), _logits(_filled(GGUFFile.open(path)), ids)
    assert expected.abs().max() > 0.5
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_the_source_models(name: str, tmp_path: Path) -> None:
    model = tiny_model(name)
    _same_logits(model, write_model(tmp_path / "m.gguf", name, model))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"head_dim": 24, "num_key_value_heads": 4}),
        ("llama", {"tie_word_embeddings": True}),
        ("mistral", {"sliding_window": None}),
        ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
        ("gemma2", {"tie_word_embeddings": False}),
        ("phi3", {"sliding_window": None, "num_key_value_heads": 4}),
    ],
)
def test_variants_keep_their_logits(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_model(name, **changes)
    _same_logits(model, write_model(tmp_path / "m.gguf", name, model))


def test_a_llama_file_with_a_window_is_a_mistral(tmp_path: Path) -> None:
    model = tiny_model("mistral")
    path = write_model(tmp_path / "m.gguf", "mistral", model)
    keys = {
        key.replace("mistral.", "llama."): value
        for key, value in GGUFFile.open(path).metadata.items()
        if key.startswith("mistral.")
    }
    path = write_model(tmp_path / "n.gguf", "llama", model, metadata=keys)
    assert build_config(GGUFFile.open(path)).model_type == "mistral"
    _same_logits(model, path)


# **** rotary embeddings ****


def _llama3_factors() -> np.ndarray[Any, np.dtype[np.float32]]:
    """``rope_freqs`` as the converter computes it for the parameters above."""
    context = float(LLAMA3["original_max_position_embeddings"])  # type: ignore[arg-type]
    factors = []
    for column in range(0, HEAD_DIM, 2):
        wave = 2 * math.pi * 50000.0 ** (column / HEAD_DIM)
        if wave < context / 4:
            factors.append(1.0)
        elif wave > context / 1:
            factors.append(8.0)
        else:
            smooth = (context / wave - 1) / (4 - 1)
            factors.append(1 / ((1 - smooth) / 8 + smooth))
    assert len({round(factor, 3) for factor in factors}) > 2
    return np.array(factors, dtype=np.float32)


def test_llama3_factors_are_applied(tmp_path: Path) -> None:
    model = tiny_model("llama", rope_parameters=LLAMA3)
    extra = {"rope_freqs.weight": _llama3_factors()}
    _same_logits(model, write_model(tmp_path / "m.gguf", "llama", model, extra=extra))


def test_any_factors_divide_the_frequencies(tmp_path: Path) -> None:
    factors = np.array([1, 1, 2, 3, 5, 7, 8, 8.5], dtype=np.float32)
    model = tiny_model("qwen2")
    path = write_model(tmp_path / "m.gguf", "qwen2", model, extra={"rope_freqs.weight": factors})
    found = _filled(GGUFFile.open(path)).get_buffer("model.rotary_emb.inv_freq")
    plain = model.get_buffer("model.rotary_emb.inv_freq")
    assert torch.equal(found, plain / torch.tensor(factors))


def test_factors_of_a_wrong_length_are_refused(tmp_path: Path) -> None:
    extra = {"rope_freqs.weight": np.ones(5, dtype=np.float32)}
    path = write_model(tmp_path / "m.gguf", "llama", tiny_model("llama"), extra=extra)
    with pytest.raises(SchemeError, match=r"\(8,\): one factor for each pair"):
        build_config(GGUFFile.open(path))


def test_yarn_keeps_its_logits(tmp_path: Path) -> None:
    model = tiny_model("qwen3", rope_parameters=YARN)
    metadata = {
        "qwen3.rope.scaling.type": "yarn",
        "qwen3.rope.scaling.factor": 4.0,
        "qwen3.rope.scaling.original_context_length": 64,
        "qwen3.rope.scaling.finetuned": True,
    }
    _same_logits(model, write_model(tmp_path / "m.gguf", "qwen3", model, metadata=metadata))


def test_linear_scaling_keeps_its_logits(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 50000.0, "factor": 2.5}
    model = tiny_model("llama", rope_parameters=rope)
    metadata = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.5}
    _same_logits(model, write_model(tmp_path / "m.gguf", "llama", model, metadata=metadata))


def test_long_and_short_factors_keep_their_logits(tmp_path: Path) -> None:
    model = tiny_model("phi3", rope_parameters=LONG, original_max_position_embeddings=16)
    metadata = {
        "phi3.rope.scaling.original_context_length": 16,
        "phi3.rope.scaling.attn_factor": 1.25,
    }
    extra = {
        f"rope_factors_{kind}.weight": np.array(LONG[f"{kind}_factor"], dtype=np.float32)
        for kind in ("long", "short")
    }
    path = write_model(tmp_path / "m.gguf", "phi3", model, metadata=metadata, extra=extra)
    _same_logits(model, path)
    # Shorter than the context it was trained on: the other list.
    ids = torch.arange(10)[None]
    torch.testing.assert_close(
        _logits(_filled(GGUFFile.open(path)), ids), _logits(model, ids), rtol=0, atol=1e-5
    )


# **** keys ****


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("llama", "rope.scaling.type", "su"),
        ("llama", "rope.scaling.factor", 4.0),
        ("llama", "rope.dimension_count", 8),
        ("llama", "attention.causal", False),
        ("llama", "attention.scale", 0.5),
        ("llama", "attention.value_length", 8),
        ("qwen2", "expert_count", 8),
        ("llama", "residual_scale", 0.5),
        ("llama", "logit_scale", 16.0),
        ("llama", "embedding_scale", 12.0),
        ("llama", "something_new", 1),
        ("llama", "block_count", "3"),
        ("llama", "embedding_length", None),
        ("llama", "attention.head_count_kv", 3),
        ("qwen2", "attention.sliding_window", 4096),
        ("qwen3", "final_logit_softcapping", 30.0),
        ("qwen2", "pooling_type", 3),
        ("gemma3", "attention.sliding_window_pattern", [True, False]),
        ("gemma3", "attention.scale", 0.3),
        ("gemma3", "rope.scaling.type", "yarn"),
        ("phi3", "rope.scaling.type", "yarn"),
        ("phi3", "rope.dimension_count", 7),
    ],
)
def test_keys_that_change_the_model_are_refused(
    name: str, key: str, value: object, tmp_path: Path
) -> None:
    metadata = {f"{name}.{key}": value}
    path = write_model(tmp_path / "m.gguf", name, tiny_model(name), metadata=metadata)
    with pytest.raises(SchemeError, match=f"{name}.{key}".replace(".", r"\.")):
        read_configuration(GGUFFile.open(path))


def test_keys_that_do_not_matter_are_listed(tmp_path: Path) -> None:
    off = {"llama.expert_count": 0, "llama.attention.causal": True, "llama.logit_scale": 1.0}
    path = write_model(tmp_path / "m.gguf", "llama", tiny_model("llama"), metadata=off)
    ignored = read_configuration(GGUFFile.open(path)).ignored
    assert {line.split(":")[0] for line in ignored} == {*off, "llama.vocab_size"}


def test_values_for_each_layer_count_when_equal(tmp_path: Path) -> None:
    model = tiny_model("llama")
    for key, equal, mixed in (
        ("llama.attention.head_count_kv", [2, 2, 2], [0, 2, 2]),
        ("llama.feed_forward_length", [96, 96, 96], [96, 48, 96]),
    ):
        path = write_model(tmp_path / "m.gguf", "llama", model, metadata={key: equal})
        _same_logits(model, path)
        path = write_model(tmp_path / "n.gguf", "llama", model, metadata={key: mixed})
        with pytest.raises(SchemeError, match="the same value for every layer"):
            build_config(GGUFFile.open(path))


def test_gemma3_layers_follow_the_file(tmp_path: Path) -> None:
    model = tiny_model("gemma3")
    key = "gemma3.attention.sliding_window_pattern"
    for pattern, full in ((None, [5]), (3, [2, 5]), ([True, False] * 3 + [False], [1, 3, 5, 6])):
        path = write_model(tmp_path / "m.gguf", "gemma3", model, metadata={key: pattern})
        types = build_config(GGUFFile.open(path)).layer_types
        assert [n for n, kind in enumerate(types) if kind == "full_attention"] == full


def test_the_scale_of_gemmas_queries(tmp_path: Path) -> None:
    model = tiny_model("gemma3")
    for metadata, scalar in (({}, 24), ({"gemma3.attention.scale": 168**-0.5}, 168)):
        path = write_model(tmp_path / "m.gguf", "gemma3", model, metadata=metadata)
        assert build_config(GGUFFile.open(path)).query_pre_attn_scalar == scalar
    # The one size whose scale is not that of a head: 46 layers of gemma2.
    changes = {"num_hidden_layers": 46, "query_pre_attn_scalar": 16}
    big = tiny_model("gemma2", **changes)
    path = write_model(tmp_path / "m.gguf", "gemma2", big)
    assert build_config(GGUFFile.open(path)).query_pre_attn_scalar == 16


def test_numbers_are_the_decimals_they_were_written_as(tmp_path: Path) -> None:
    model = tiny_model("llama", rms_norm_eps=1e-6)
    file = GGUFFile.open(write_model(tmp_path / "m.gguf", "llama", model))
    assert file.metadata["llama.attention.layer_norm_rms_epsilon"] != 1e-6
    assert build_config(file).rms_norm_eps == 1e-6


def test_special_tokens_reach_config_and_generation(tmp_path: Path) -> None:
    metadata = {
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.eot_token_id": 5,
        "tokenizer.ggml.eom_token_id": 2,
    }
    model = tiny_model("llama")
    file = GGUFFile.open(write_model(tmp_path / "m.gguf", "llama", model, metadata=metadata))
    config, generation = build_config(file), build_generation_config(file)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 0)
    assert (generation.bos_token_id, generation.pad_token_id) == (1, 0)
    assert generation.eos_token_id == [2, 5]
    metadata = {"tokenizer.ggml.eos_token_id": 96}
    file = GGUFFile.open(write_model(tmp_path / "n.gguf", "llama", model, metadata=metadata))
    with pytest.raises(SchemeError, match="eos_token_id is 96"):
        build_config(file)


# **** checkpoints of other tools ****


@pytest.mark.parametrize("entry", DENSE)
def test_zoo_logits(entry: str) -> None:
    path, refs = ZOO / "gguf" / f"{entry}.gguf", ZOO / "refs" / f"{entry}.npz"
    if not path.exists() or not refs.exists():
        pytest.skip(f"{path} or {refs} is missing")
    with np.load(refs) as stored:
        arrays = {key: stored[key] for key in stored.files if "logits" in key}
    model = _filled(GGUFFile.open(path))
    sequences = json.loads((ZOO / "manifest.json").read_text())["sequences"]
    for length in ("128", "16"):
        name = f"exact_logits_{length}"
        expected = torch.from_numpy(arrays.get(name, arrays[f"peer_logits_{length}"]))
        found = _logits(model, torch.tensor([sequences[length]]))[0, -16:]
        assert (found - expected).norm() / expected.norm() < 1e-4
