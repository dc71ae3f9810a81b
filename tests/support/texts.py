"""A tiny Llama that reads text, compiled and exact.

Comes in: a folder to write it to. Goes out: the model of ``from_pretrained``, the same in float32
with the exact weights, and a tokenizer that pads on the left.
Always holds: weights are wide enough that no two logits are close to a tie.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import qcompile
from support.llama import exact_llama, llama_config, llama_layers, write_llama
from support.pack_gptq import Gptq, gptq
from support.packers import Packed
from support.zoo import DATA

FOLDER = DATA / "gptq-w2-g32-asym"  # has the tokenizer
Pair = tuple[Any, Any, Any]


def text_models(folder: Path, emitter: str = "eager", layers: int = 1) -> Pair:
    """The compiled model, the exact one, the tokenizer; both models greedy by default."""
    config = llama_config(
        vocab_size=2048, max_position_embeddings=512, pad_token_id=0, num_hidden_layers=layers
    )
    stored = llama_layers(config, _body)
    write_llama(folder, config, stored, Gptq(4, 32).config)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(FOLDER / name, folder / name)
    settings = qcompile.HFConfig(emitter=emitter)
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=settings, dtype=torch.float32, attn_implementation="sdpa"
    )
    exact = exact_llama(config, stored).eval()
    return model, exact, AutoTokenizer.from_pretrained(folder, padding_side="left")


def _body(name: str, n: int, k: int, seed: int) -> Packed | None:
    return None if name == "lm_head" else gptq(n, k, Gptq(4, 32), seed)
