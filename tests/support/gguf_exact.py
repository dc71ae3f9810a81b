"""Files of models with experts, compiled, beside the exact models.

Comes in: a model of ``gguf_writer`` and the types its tensors are stored in. Goes out: the model
with the weights that gguf-py decodes; the compiled model.
Always holds: what is expected comes from transformers' own eager experts and gguf-py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import nn

import qcompile
from qcompile.hf import build_skeleton
from qcompile.schemes.gguf.config import build_config
from qcompile.schemes.gguf.reader import GGUFFile
from support import gguf_mixtures
from support.gguf_writer import map_of, quantize, tensors_of, tiny_model
from support.zoo import relative_l2

BOUND = 1e-5
# Gate and up differ in type; the rest of the layer is quantized as well.
TYPES = {
    "ffn_gate_exps.weight": "Q4_0",
    "ffn_up_exps.weight": "Q5_1",
    "ffn_down_exps.weight": "Q8_0",
    "ffn_gate_up_exps.weight": "Q4_0",
    "ffn_gate_shexp.weight": "Q4_1",
    "ffn_up_shexp.weight": "Q8_0",
    "ffn_down_shexp.weight": "Q5_0",
    "attn_q.weight": "Q8_0",
    "attn_output.weight": "Q4_1",
    "attn_k_b.weight": "Q8_0",
    "attn_v_b.weight": "Q5_0",
    "attn_kv_b.weight": "Q8_0",
    "token_embd.weight": "Q8_0",
    "output.weight": "Q5_1",
}
MXFP4 = TYPES | {f"ffn_{role}_exps.weight": "MXFP4" for role in ("gate", "up", "down")}


def exact(architecture: str, model: nn.Module, types: dict[str, str]) -> nn.Module:
    """The model with every weight as gguf-py decodes what the writer stores."""
    stored = {
        name: decoded(name, np.ascontiguousarray(values), types)
        for name, values in tensors_of(architecture, model).items()
    }
    state = gguf_mixtures.state(architecture, stored, model)
    names = {n: v for n, v in model.state_dict().items() if n not in state}
    for name, values in names.items():
        # What is only renamed, and permuted by whole rows, is decoded row by row.
        short = _file_name(name, architecture, model)
        if short is not None:
            rows = np.ascontiguousarray(values.numpy())
            state[name] = torch.from_numpy(decoded(short, rows, types))
    model.load_state_dict(state, strict=False)
    return model


def _file_name(name: str, architecture: str, model: nn.Module) -> str | None:
    config: Any = model.config
    names = gguf.get_tensor_name_map(map_of(architecture), config.num_hidden_layers)
    return "output.weight" if name == "lm_head.weight" else names.get_name(name, (".weight",))


def decoded(name: str, values: Any, types: dict[str, str]) -> Any:
    short = name.split(".", 2)[2] if name.startswith("blk.") else name
    kind = gguf.GGMLQuantizationType[types.get(name) or types.get(short, "F32")]
    if kind.name == "F32":
        return values
    return gguf.quants.dequantize(quantize(values, kind), kind)


def ids_of(tokens: int) -> torch.Tensor:
    return torch.randint(0, 96, (1, tokens), generator=torch.Generator().manual_seed(tokens))


def agree(model: Any, exact: nn.Module, *lengths: int) -> None:
    for tokens in lengths:
        ids = ids_of(tokens)
        with torch.no_grad():
            expected = exact(ids).logits
        difference = relative_l2(model(ids).logits, expected)
        assert difference < BOUND, f"{tokens} tokens: {difference:.2e}"


def small(name: str, **changes: Any) -> nn.Module:
    """A model of two layers."""
    return tiny_model(name, **{"num_hidden_layers": 2, **changes})


def load(path: Path, **options: Any) -> Any:
    torch._dynamo.reset()
    skeleton = build_skeleton(build_config(GGUFFile.open(path)), torch.float32)
    settings = {"emitter": "eager", "verify": True, **options}
    return qcompile.optimize(skeleton, checkpoint=path, **settings)
