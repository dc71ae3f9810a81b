"""Small Hugging Face models as GGUF files, written the way llama.cpp's converter writes them.

Comes in: an architecture's name. Goes out: a random model, or a file with its weights.
Always holds: names, transforms and metadata are coded here a second time, from the converter's
behaviour and gguf-py's tensor map, and share nothing with ``qcompile.schemes``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import nn

from support import gguf_mixtures

Array = np.ndarray[Any, np.dtype[Any]]

VOCABULARY, HIDDEN, LAYERS, HEADS, GROUPS, HEAD_DIM, INNER = 96, 64, 3, 4, 2, 16, 96
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_THETA = {"rope_type": "default", "rope_theta": 50000.0}
# Values that no default hits by chance.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rope_parameters": _THETA},
    "mistral": {"model_type": "mistral", "rope_parameters": _THETA, "sliding_window": 5},
    "qwen2": {"model_type": "qwen2", "rope_parameters": _THETA},
    "qwen3": {"model_type": "qwen3", "rope_parameters": _THETA, "head_dim": 24},
    "gemma2": {
        "model_type": "gemma2",
        "head_dim": 24,
        "query_pre_attn_scalar": 24,
        "sliding_window": 5,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 1.5,
        "tie_word_embeddings": True,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 24,
        "query_pre_attn_scalar": 24,
        "sliding_window": 5,
        "num_hidden_layers": 7,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 300000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "phi3": {
        "model_type": "phi3",
        "rope_parameters": _THETA | {"partial_rotary_factor": 0.5},
        "sliding_window": 5,
    },
    **gguf_mixtures.CONFIGS,
}
# What files call an architecture that shares its name with another one.
_WRITTEN = {**gguf_mixtures.WRITTEN}


def tiny_model(architecture: str, **changes: Any) -> nn.Module:
    """A random float32 model of an architecture, eager attention, with biases and norms at work."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {**_COMMON, **CONFIGS[architecture], **changes}
    model_type = values.pop("model_type")
    if model_type in ("phi3", "qwen2_moe", "olmoe", "deepseek_v2", "deepseek_v3"):
        values.pop("head_dim")
    config = AutoConfig.for_model(model_type, attn_implementation="eager", **values)
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            # The usual initial values leave norms at one and biases at zero, which hides mistakes.
            parameter.add_(torch.randn_like(parameter) * 0.05)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer) * 0.2)
    return model.eval().requires_grad_(False)


def write_model(
    path: Path,
    architecture: str,
    model: nn.Module,
    *,
    types: Mapping[str, str] | None = None,
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, Array] | None = None,
    drop: tuple[str, ...] = (),
    change: Callable[[str, Array], Array] = lambda name, array: array,
    rename: Callable[[dict[str, Array]], dict[str, Array]] = lambda tensors: tensors,
) -> Path:
    """Write a model.

    Args:
        path: the file.
        architecture: what ``general.architecture`` says.
        model: a model made by ``tiny_model``.
        types: type of a tensor by its name in the file or by the part after ``blk.N.``, for
            instance ``Q8_0``; F32 otherwise.
        metadata: keys to add or change; None leaves a key out.
        extra: further tensors.
        drop: names in the file of tensors to leave out.
        change: called with each tensor's name in the file before it is stored.
        rename: called with all tensors first.
    """
    writer = gguf.GGUFWriter(str(path), _WRITTEN.get(architecture, architecture))
    keys = metadata_of(architecture, model.config) | dict(metadata or {})
    for key, value in keys.items():
        _add(writer, key, value)
    for name, array in {**rename(tensors_of(architecture, model)), **(extra or {})}.items():
        if name in drop:
            continue
        stored = np.ascontiguousarray(change(name, array))
        kind = gguf.GGMLQuantizationType[_type_of(name, types or {})]
        data = stored if kind.name == "F32" else quantize(stored, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _type_of(name: str, types: Mapping[str, str]) -> str:
    return types.get(name) or types.get(re.sub(r"^blk\.\d+\.", "", name), "F32")


def quantize(array: Array, kind: gguf.GGMLQuantizationType) -> Array:
    """A tensor as blocks; random valid blocks for the types that gguf-py cannot write."""
    try:
        blocks_of: Array = gguf.quants.quantize(array, kind)
        return blocks_of
    except NotImplementedError:
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        shape = (*array.shape[:-1], array.shape[-1] // elements, size)
        data = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
        # A float16 with exponent bits 01xxx is finite; scales stand at the start or the end.
        for at in (1, 3, size - 1):
            data[..., at] = 0x20
        return data.reshape(*array.shape[:-1], -1)


# **** tensors ****


def tensors_of(architecture: str, model: nn.Module) -> dict[str, Array]:
    """Every tensor by its name in the file, converted."""
    config: Any = model.config
    names = gguf.get_tensor_name_map(map_of(architecture), config.num_hidden_layers)
    found: dict[str, Array] = {}
    state = {**dict(model.named_parameters()), **_buffers(model)}
    for parameter, values in state.items():
        number, _, module = parameter.removeprefix("model.layers.").partition(".")
        if number.isdigit():
            arrays = gguf_mixtures.tensors(
                architecture, f"blk.{number}", module, values.numpy(), config
            )
            if arrays is not None:
                found |= arrays
                continue
        name = names.get_name(parameter, try_suffixes=(".weight", ".bias"))
        if parameter == "lm_head.weight":  # missing from the maps of families that tie
            name = "output.weight"
        assert name is not None, parameter
        found[name] = _convert(architecture, name, values.numpy(), config)
    return found


def map_of(architecture: str) -> gguf.MODEL_ARCH:
    """gguf-py's number of an architecture."""
    written = "llama" if architecture == "mistral" else _WRITTEN.get(architecture, architecture)
    return gguf.MODEL_ARCH[written.upper().replace("-", "_")]


def _buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that a checkpoint of the model holds."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {n: v for n, v in model.state_dict().items() if n not in parameters}


def _convert(architecture: str, name: str, array: Array, config: Any) -> Array:
    if architecture in ("llama", "mistral", "mixtral") and ".attn_q." in name:
        return _interleave(array, config.num_attention_heads)
    if architecture in ("llama", "mistral", "mixtral") and ".attn_k." in name:
        return _interleave(array, config.num_key_value_heads)
    if architecture in ("gemma2", "gemma3") and name.endswith("norm.weight"):
        return array + 1
    return array


def _interleave(array: Array, heads: int) -> Array:
    half = array.shape[0] // heads // 2
    split = array.reshape(heads, 2, half, *array.shape[1:])
    mixed: Array = split.swapaxes(1, 2).reshape(array.shape)
    return mixed


# **** metadata ****


def metadata_of(architecture: str, config: Any) -> dict[str, Any]:
    """The keys that the converter writes for a model."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    keys: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "vocab_size": config.vocab_size,
    }
    rope = config.rope_parameters
    if architecture == "gemma3":
        full = rope["full_attention"]
        keys |= {"rope.freq_base": full["rope_theta"], "rope.scaling.type": full["rope_type"]}
        keys |= {"rope.scaling.factor": full["factor"]}
    elif architecture != "gemma2":
        keys["rope.freq_base"] = rope["rope_theta"]
        keys["rope.dimension_count"] = int(head * rope.get("partial_rotary_factor", 1.0))
    if head != config.hidden_size // config.num_attention_heads:
        keys |= {"attention.key_length": head, "attention.value_length": head}
    if architecture in ("mistral", "gemma2", "gemma3", "phi3"):
        keys["attention.sliding_window"] = config.sliding_window
    if architecture == "gemma2":
        keys["attn_logit_softcapping"] = config.attn_logit_softcapping
        keys["final_logit_softcapping"] = config.final_logit_softcapping
    if architecture == "phi3":
        keys["rope.scaling.original_context_length"] = config.max_position_embeddings
    if architecture in gguf_mixtures.CONFIGS:
        keys |= gguf_mixtures.metadata(architecture, config)
    prefix = _WRITTEN.get(architecture, architecture)
    named = {f"{prefix}.{key}": value for key, value in keys.items()}
    named |= {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    return named


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
