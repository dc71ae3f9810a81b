"""Small quantized models, and GPTQ folders read without the package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import qcompile

transformers: Any = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")


def llama(**changes: Any) -> Any:
    config = transformers.LlamaConfig(
        **{
            "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
            "max_position_embeddings": 64, "tie_word_embeddings": False,
        } | changes
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


IDS = torch.randint(0, 160, (2, 12), generator=torch.Generator().manual_seed(0))
DATA = [torch.randint(0, 160, (8, 32), generator=torch.Generator().manual_seed(1))]


def quantized(model: Any, **options: Any) -> Any:
    if options.get("desc_act"):
        options |= {"scheme": "gptq", "calibration": DATA}
    plain: dict[str, Any] = {"scheme": "rtn", "sym": True}
    return qcompile.optimize(model, emitter="eager", **(plain | options))


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: w.dequantize() for name, w in model.qcompile.catalogue.items()}


def stored(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= safetensors_torch.load_file(file)
    return found


def stream(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Fields of a run of bits along the first dimension, written with no code of the package."""
    lanes = np.arange(32, dtype=np.uint32)[None, :, None]
    flat = (words.view(np.uint32)[:, None, :] >> lanes) & 1
    flat = flat.reshape(-1, words.shape[1])[: count * bits].reshape(count, bits, -1)
    fields: np.ndarray = (flat.astype(np.int64) << np.arange(bits)[None, :, None]).sum(1)
    return fields


def decoded(tensors: dict[str, torch.Tensor], path: str, bits: int, plus: int) -> torch.Tensor:
    """A GPTQ weight ``[N, K]`` by the formula of the format, adding ``plus`` to zero points."""
    words, zeros, scales, index = (
        tensors[f"{path}.{name}"].numpy() for name in ("qweight", "qzeros", "scales", "g_idx")
    )
    codes = stream(words, bits, len(index))
    true = stream(np.ascontiguousarray(zeros.T), bits, scales.shape[1]).T + plus
    weight = scales.astype(np.float32)[index] * (codes - true[index]).astype(np.float32)
    return torch.from_numpy(weight.T.copy())


def load(folder: Path) -> Any:
    model = llama(tie_word_embeddings=config_of(folder)["tie_word_embeddings"])
    return qcompile.optimize(model, checkpoint=folder, emitter="eager")


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found
