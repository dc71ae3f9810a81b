"""Small models with a mixture of experts as GGUF files.

Comes in: an architecture's name. Goes out: its configuration, what the converter makes of its
tensors and its metadata, and the model with the weights of a file.
Always holds: names and transforms are coded here from the converter's behaviour and share nothing
with ``qcompile.schemes``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

Array = np.ndarray[Any, np.dtype[Any]]
Arrays = dict[str, Array]

EXPERTS, CHOSEN, WIDTH = 4, 2, 32
_THETA = {"rope_type": "default", "rope_theta": 50000.0}
_COUNTS = {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN}
_LATENT = {
    "rope_parameters": _THETA,
    "moe_intermediate_size": WIDTH,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "num_experts_per_tok": CHOSEN,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "routed_scaling_factor": 1.75,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": {
        "model_type": "mixtral",
        "rope_parameters": _THETA,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": CHOSEN,
    },
    "qwen2moe": {
        "model_type": "qwen2_moe",
        "rope_parameters": _THETA,
        "moe_intermediate_size": WIDTH,
        "shared_expert_intermediate_size": 64,
        "norm_topk_prob": False,
        **_COUNTS,
    },
    "qwen3moe": {
        "model_type": "qwen3_moe",
        "rope_parameters": _THETA,
        "head_dim": 24,
        "moe_intermediate_size": WIDTH,
        "norm_topk_prob": True,
        **_COUNTS,
    },
    "olmoe": {
        "model_type": "olmoe",
        "rope_parameters": _THETA,
        "num_key_value_heads": 4,
        "norm_topk_prob": False,
        **_COUNTS,
    },
    "deepseek2": {"model_type": "deepseek_v2", "n_routed_experts": EXPERTS, **_LATENT},
    "deepseek3": {
        "model_type": "deepseek_v3",
        "n_routed_experts": 2 * EXPERTS,
        "n_group": 2,
        "topk_group": 1,
        "norm_topk_prob": True,
        "num_mtp_layers": 0,
        **_LATENT,
    },
    "gpt-oss": {
        "model_type": "gpt_oss",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 50000.0,
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 32,
        },
        "sliding_window": 5,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": CHOSEN,
    },
}
# What the file calls the architecture, and gguf-py's name of its tensor map.
WRITTEN = {"mixtral": "llama", "deepseek3": "deepseek2"}
# Where the models of transformers keep the experts of a layer.
_EXPERTS = "mlp.experts."


def tensors(
    architecture: str, layer: str, module: str, values: Array, config: Any
) -> Arrays | None:
    """What becomes of one parameter that is not simply renamed; None for the others.

    Args:
        architecture: a name of ``CONFIGS``.
        layer: ``blk.N`` of the file.
        module: the parameter's name after ``model.layers.N.``.
        values: its values.
        config: of the model.
    """
    if module.startswith(_EXPERTS):
        return _experts(architecture, layer, module.removeprefix(_EXPERTS), values)
    if module == "self_attn.sinks":
        return {f"{layer}.attn_sinks.weight": values}
    if module == "mlp.gate.e_score_correction_bias":
        return {f"{layer}.exp_probs_b.bias": values}
    if module == "mlp.shared_expert_gate.weight":
        return {f"{layer}.ffn_gate_inp_shexp.weight": values[0]}
    if module == "self_attn.kv_b_proj.weight":
        nope, rows = config.qk_nope_head_dim, config.v_head_dim
        heads = values.reshape(config.num_attention_heads, nope + rows, config.kv_lora_rank)
        return {
            f"{layer}.attn_k_b.weight": heads[:, :nope].transpose(0, 2, 1),
            f"{layer}.attn_v_b.weight": heads[:, nope:],
        }
    return None


def _experts(architecture: str, layer: str, parameter: str, values: Array) -> Arrays:
    turned, bias = architecture == "gpt-oss", parameter.endswith("_bias")
    part = "bias" if bias else "weight"
    if turned and not bias:
        values = values.transpose(0, 2, 1)
    if parameter.startswith("down_proj"):
        return {f"{layer}.ffn_down_exps.{part}": values}
    if turned:
        gate, up = values[:, ::2], values[:, 1::2]
    else:
        gate, up = np.split(values, 2, axis=1)
    return {f"{layer}.ffn_gate_exps.{part}": gate, f"{layer}.ffn_up_exps.{part}": up}


def state(architecture: str, stored: Mapping[str, Array], model: nn.Module) -> dict[str, Any]:
    """The experts' parameters of a model, and what else is split, from a file's tensors."""
    found: dict[str, Any] = {}
    config: Any = model.config
    for name, own in model.named_parameters():
        if not name.startswith("model.layers."):
            continue
        number, module = name.removeprefix("model.layers.").split(".", 1)
        layer = f"blk.{number}"
        if module.startswith(_EXPERTS):
            values = _joined(architecture, layer, module.removeprefix(_EXPERTS), stored)
        elif module == "self_attn.kv_b_proj.weight" and f"{layer}.attn_k_b.weight" in stored:
            keys = stored[f"{layer}.attn_k_b.weight"].transpose(0, 2, 1)
            values = np.concatenate([keys, stored[f"{layer}.attn_v_b.weight"]], 1)
            values = values.reshape(-1, config.kv_lora_rank)
        else:
            continue
        found[name] = torch.from_numpy(np.ascontiguousarray(values)).reshape(own.shape)
    return found


def _joined(architecture: str, layer: str, parameter: str, stored: Mapping[str, Array]) -> Array:
    turned, bias = architecture == "gpt-oss", parameter.endswith("_bias")
    part = "bias" if bias else "weight"

    def of(kind: str) -> Array:
        return stored[f"{layer}.ffn_{kind}_exps.{part}"]

    if parameter.startswith("down_proj"):
        values = of("down")
    elif turned:
        gate, up = of("gate"), of("up")
        values = np.empty((gate.shape[0], 2 * gate.shape[1], *gate.shape[2:]), np.float32)
        values[:, ::2], values[:, 1::2] = gate, up
    else:
        values = np.concatenate([of("gate"), of("up")], 1)
    return values.transpose(0, 2, 1) if turned and not bias else values


def one_by_one(stored: Arrays) -> Arrays:
    """The tensors as old converters named them: every expert's matrices by themselves."""
    found: Arrays = {}
    for name, values in stored.items():
        if name.endswith("_exps.weight"):
            stem = name.removesuffix("_exps.weight")
            found |= {f"{stem}.{e}.weight": values[e] for e in range(len(values))}
        else:
            found[name] = values
    return found


def fused(stored: Arrays) -> Arrays:
    """The tensors with gate and up in one, as new converters can write them."""
    found = {name: values for name, values in stored.items() if "ffn_up_exps" not in name}
    for name in [name for name in found if "ffn_gate_exps" in name]:
        up = stored[name.replace("gate", "up")]
        found[name.replace("gate", "gate_up")] = np.concatenate([found.pop(name), up], 1)
    return found


def unsplit(stored: Arrays, model: nn.Module) -> Arrays:
    """The tensors as old converters wrote DeepSeek's attention: keys and values in one matrix."""
    found = {n: v for n, v in stored.items() if "attn_k_b" not in n and "attn_v_b" not in n}
    for number in range(model.config.num_hidden_layers):  # type: ignore[union-attr, arg-type]
        own = model.get_parameter(f"model.layers.{number}.self_attn.kv_b_proj.weight")
        found[f"blk.{number}.attn_kv_b.weight"] = own.numpy()
    return found


def metadata(architecture: str, config: Any) -> dict[str, Any]:
    """The keys that the converter writes for the experts of a model, and for its attention."""
    keys: dict[str, Any] = {"expert_used_count": config.num_experts_per_tok}
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        if getattr(config, name, None) is not None:
            keys["expert_count"] = getattr(config, name)
    if architecture in ("qwen2moe", "qwen3moe", "deepseek2", "deepseek3"):
        keys["expert_feed_forward_length"] = config.moe_intermediate_size
    if architecture == "gpt-oss":
        keys["expert_feed_forward_length"] = config.intermediate_size
        keys["attention.sliding_window"] = config.sliding_window
    if architecture == "qwen2moe":
        keys["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    if architecture.startswith("deepseek"):
        keys |= _latent_metadata(architecture, config)
    rope = config.rope_parameters
    if rope["rope_type"] == "yarn":
        keys["rope.scaling.type"] = "yarn"
        keys["rope.scaling.factor"] = rope["factor"]
        keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        keys["rope.scaling.yarn_beta_fast"] = rope.get("beta_fast", 32.0)
        keys["rope.scaling.yarn_beta_slow"] = rope.get("beta_slow", 1.0)
        if "mscale_all_dim" in rope:
            keys["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    return keys


def _latent_metadata(architecture: str, config: Any) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "leading_dense_block_count": config.first_k_dense_replace,
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_scale": config.routed_scaling_factor,
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": config.qk_rope_head_dim,
    }
    if config.q_lora_rank is not None:
        keys["attention.q_lora_rank"] = config.q_lora_rank
    if architecture == "deepseek3":
        keys["expert_gating_func"] = 2
        if config.norm_topk_prob:
            keys["expert_weights_norm"] = True
    if config.n_group is not None:
        keys["expert_group_count"] = config.n_group
        keys["expert_group_used_count"] = config.topk_group
    return keys
