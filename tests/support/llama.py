"""Tiny Llama checkpoints as folders.

Comes in: how each linear is to be packed. Goes out: a folder that ``qcompile.load`` takes, and the
exact float32 model.
Always holds: tensor names are those of ``LlamaForCausalLM``; floats are stored as bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import qcompile
from support.folders import BOUND, exact
from support.packers import Config, Layers, Packed, write_folder
from support.zoo import relative_l2

HIDDEN, INNER, VOCABULARY = 64, 96, 128
IDS = torch.tensor([[1, 5, 127, 0, 64, 5], [2, 2, 40, 7, 9, 3]])
Pack = Callable[[str, int, int, int], Packed | None]


def llama_config(**changes: Any) -> Any:
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
        "architectures": ["LlamaForCausalLM"],
        "attn_implementation": "eager",
    }
    return LlamaConfig(**{**settings, **changes})


def llama_layers(config: Any, pack: Pack, head: bool = True) -> dict[str, Packed | torch.Tensor]:
    """Every tensor of the model.

    Args:
        config: of the model.
        pack: packs a linear of this name, N, K and seed; None where it stays float.
        head: whether there is an ``lm_head``.
    """
    torch.manual_seed(0)
    found: dict[str, Packed | torch.Tensor] = {}
    model = LlamaForCausalLM(config)
    for seed, (name, module) in enumerate(model.named_modules()):
        if isinstance(module, nn.Linear) and (head or name != "lm_head"):
            packed = pack(name, module.out_features, module.in_features, seed)
            found[name if packed else f"{name}.weight"] = (
                packed or (torch.randn(module.weight.shape) * 0.1).bfloat16()
            )
        elif not isinstance(module, nn.Linear) and getattr(module, "weight", None) is not None:
            noise = torch.randn(module.weight.shape)
            mean = 0.0 if isinstance(module, nn.Embedding) else 1.0
            found[f"{name}.weight"] = (mean + noise * 0.3).bfloat16()
    return found


def write_llama(folder: Path, config: Any, layers: Layers, quantization: Config) -> Path:
    return write_folder(folder, layers, quantization, config.to_dict())


def exact_llama(config: Any, layers: Layers) -> nn.Module:
    """The model in float32 with the exact weights."""
    model = LlamaForCausalLM(config).float()
    model.tie_weights()
    return exact(model, layers)


def check_llama(folder: Path, config: Any, layers: Layers) -> Any:
    """Load a folder and compare logits with the exact model. Returns the compiled model."""
    torch._dynamo.reset()
    model: Any = qcompile.load(folder, emitter="eager", verify=True)[0]
    difference = relative_l2(model(IDS).logits, exact_llama(config, layers)(IDS).logits)
    assert difference < BOUND, f"{difference:.2e}"
    return model
