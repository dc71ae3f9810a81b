"""Tiny models with a mixture of experts as GPTQ folders.

Comes in: an architecture of ``gguf_mixtures``, and how experts are to be packed. Goes out: a folder
that ``qcompile.load`` takes, and the exact float32 model.
Always holds: every expert's matrices are linears of their own, named as the tools name them; what
is expected comes from the packers, computed by transformers' own eager experts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from support.gguf_writer import tiny_model
from support.pack_gptq import Gptq, gptq
from support.packers import Layers, Packed, write_folder

Pack = Callable[[str, int, int, int], Packed | None]
WHAT = Gptq(4, 32)
EXPERT = "mlp.experts.{e}.{role}_proj"
# Mixtral's own code has other names.
_MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}


def four_bits(name: str, n: int, k: int, seed: int) -> Packed | None:
    """Everything in groups of 32, routers and heads in float."""
    bias = "experts" in name and "gpt" in name
    return gptq(n, k, Gptq(4, 32, bias=bias), seed)


def expert_name(architecture: str, layer: str, expert: int, role: str) -> str:
    if architecture == "mixtral":
        return f"{layer}.block_sparse_moe.experts.{expert}.{_MIXTRAL[role]}"
    return f"{layer}.mlp.experts.{expert}.{role}_proj"


def folder_layers(
    architecture: str, model: Any, pack: Pack = four_bits
) -> dict[str, Packed | torch.Tensor]:
    """Every tensor of a model by the folder's names; the model gets the exact values.

    Args:
        architecture: a name of ``gguf_mixtures.CONFIGS``.
        model: changed in place.
        pack: packs the linear of this name, N, K and seed; None where it stays float.
    """
    found: dict[str, Packed | torch.Tensor] = {}
    state: dict[str, torch.Tensor] = {}
    for seed, (name, value) in enumerate(model.state_dict().items()):
        layer, _, parameter = name.partition(".mlp.experts.")
        if parameter:
            found |= _experts(architecture, layer, parameter, value, pack, seed, state)
            continue
        linear = name.endswith("_proj.weight")
        packed = None
        if linear:
            packed = pack(name.removesuffix(".weight"), value.shape[0], value.shape[1], seed)
        if packed is None:
            written = name
            if architecture == "mixtral":
                written = name.replace(".mlp.", ".block_sparse_moe.")
            state[name] = found[written] = value.clone()
        else:
            found[name.removesuffix(".weight")] = packed
            state[name] = packed.exact
    model.load_state_dict(state, strict=False)
    return found


def _experts(
    architecture: str,
    layer: str,
    parameter: str,
    value: torch.Tensor,
    pack: Pack,
    seed: int,
    state: dict[str, torch.Tensor],
) -> dict[str, Packed | torch.Tensor]:
    """The linears of one parameter of an experts module."""
    if parameter.endswith("_bias"):
        return {}  # stored with the weights
    turned = architecture == "gpt-oss"
    rows, columns = value.shape[:0:-1] if turned else value.shape[1:]
    roles = ("down",) if parameter == "down_proj" else ("gate", "up")
    found: dict[str, Packed | torch.Tensor] = {}
    weights, biases = [], []
    for expert in range(len(value)):
        parts: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        for place, role in enumerate(roles):
            name = expert_name(architecture, layer, expert, role)
            marked = f"gpt.{name}" if turned else name
            packed = pack(marked, rows // len(roles), columns, 1000 * seed + 10 * expert + place)
            if packed is None:
                half = value[expert].t() if turned else value[expert]
                half = half[place :: len(roles)] if turned else half.chunk(len(roles))[place]
                found[f"{name}.weight"] = half.clone()
                parts.append((half, None))
                continue
            found[name] = packed
            parts.append((packed.exact, packed.tensors.get("bias")))
        weights.append(_model_order([w for w, _ in parts], turned))
        biases.append([b for _, b in parts])
    stacked = torch.stack(weights)
    state[f"{layer}.mlp.experts.{parameter}"] = stacked.transpose(1, 2) if turned else stacked
    if turned:
        state[f"{layer}.mlp.experts.{parameter}_bias"] = torch.stack(
            [_model_order([b.float() for b in pair if b is not None], True) for pair in biases]
        )
    return found


def _model_order(parts: list[torch.Tensor], turned: bool) -> torch.Tensor:
    if len(parts) == 1:
        return parts[0]
    return torch.stack(parts, 1).flatten(0, 1) if turned else torch.cat(parts)


def small(architecture: str, **changes: Any) -> Any:
    """A model of two layers whose matrices can be packed in groups of 32."""
    return tiny_model(architecture, **{"num_hidden_layers": 2, **changes})


def write_experts(folder: Path, model: nn.Module, layers: Layers, quantization: Any = None) -> Path:
    config: Any = model.config
    content = {**config.to_dict(), "architectures": [type(model).__name__]}
    return write_folder(folder, layers, quantization or WHAT.config, content)
