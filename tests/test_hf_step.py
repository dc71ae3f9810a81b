"""Models of transformers as functions of ids, positions and caches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.gguf_writer import tiny_model
from support.zoo import relative_l2
from transformers import AutoConfig, AutoModelForCausalLM

from qcompile.errors import CaptureError, OptionError
from qcompile.hf_step import Step, check_context, check_forward, empty_caches, layers_of

CONTEXT = 48
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
}


def random_model(kind: str, **changes: Any) -> Any:
    config = AutoConfig.for_model(kind, **{**SMALL, **changes})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def kept(model: Any, tokens: int = 12) -> list[torch.Tensor]:
    with torch.no_grad():
        output = model(input_ids=torch.arange(tokens)[None], use_cache=True)
    return empty_caches(layers_of(output, "model"), CONTEXT, "model")


# Grouped heads, biases, norms of queries and keys, windows of five, capped scores, sinks, experts,
# values narrower than keys.
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "phi3", "gemma2", "gemma3", "gpt-oss")
EXPERTS = ("mixtral", "qwen3moe", "deepseek3")


@pytest.mark.parametrize("family", [*FAMILIES, *EXPERTS])
def test_steps_are_the_model(family: str) -> None:
    model: Any = tiny_model(family, num_hidden_layers=2)
    caches, step = kept(model), Step(model)
    assert len(caches) == 4
    ids = torch.randint(96, (CONTEXT,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(input_ids=ids[None]).logits[0]
        for text in range(2):  # the second one over what the first has left
            place = 0
            for count in (7, 1, 1, 20, 1, 18) if text == 0 else (1, 3, 12):
                part, positions = ids[place : place + count], torch.arange(place, place + count)
                found = step(part[None], positions, caches)
                place += count
                assert found.shape == (1, 1, 96)
                assert relative_l2(found[0, 0], expected[place - 1]) < 1e-5


def test_positions_of_a_table() -> None:
    model = random_model("opt", ffn_dim=96, word_embed_proj_dim=64)
    caches, ids = kept(model), torch.arange(20)
    with torch.no_grad():
        expected = model(input_ids=ids[None]).logits[0]
        Step(model)(ids[None, :15], torch.arange(15), caches)
        found = Step(model)(ids[None, 15:], torch.arange(15, 20), caches)
    assert relative_l2(found[0, 0], expected[-1]) < 1e-5


_LINEAR: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention"],
        "head_dim": 16,
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "minimax": {"layer_types": ["linear_attention", "full_attention"]},
}


@pytest.mark.parametrize("kind", _LINEAR)
def test_other_state_is_refused(kind: str) -> None:
    model = random_model(kind, **_LINEAR[kind])
    check_forward(model)
    with pytest.raises(CaptureError, match=r"conv_states|linear_cache"):
        kept(model)


@pytest.mark.parametrize("kind", ["mamba", "bloom"])
def test_models_without_positions_are_refused(kind: str) -> None:
    model = random_model(kind)
    for call in (check_forward, Step):
        with pytest.raises(CaptureError, match=r"forward takes input_ids[\s\S]*position_ids"):
            call(model)


def test_what_returns_no_keys() -> None:
    for output in (
        SimpleNamespace(),
        SimpleNamespace(cache=None, logits=torch.zeros(1)),
        SimpleNamespace(cache=SimpleNamespace(layers=[]), logits=torch.zeros(1)),
        SimpleNamespace(cache=SimpleNamespace(layers=[object()])),
    ):
        with pytest.raises(CaptureError, match="no keys and values"):
            layers_of(output, "model")
    state = SimpleNamespace(layers=[object()], seen={"0": torch.zeros(3)})
    with pytest.raises(CaptureError, match="it keeps seen"):
        layers_of(SimpleNamespace(cache=state, logits=torch.zeros(1)), "model")
    flat = SimpleNamespace(keys=torch.zeros(1, 2, 3), values=torch.zeros(1, 2, 3))
    with pytest.raises(CaptureError, match="no keys and values"):
        empty_caches([flat], CONTEXT, "model")


def test_contexts_in_which_keys_change() -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [3.0] * 8,
        "original_max_position_embeddings": 64,
    }
    changes: Any = {"rope_parameters": rope, "original_max_position_embeddings": 64}
    model = random_model("phi3", **changes)
    check_context(model, 64)
    with pytest.raises(OptionError, match=r"context=65[\s\S]*another one beyond 64"):
        check_context(model, 65)
    check_context(tiny_model("gemma3"), 4096)
