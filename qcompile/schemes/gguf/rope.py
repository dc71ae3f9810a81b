"""Rotary embeddings: from metadata and helper tensors to Hugging Face's ``rope_parameters``.

Comes in: the metadata keys ``rope.*`` and the tensors ``rope_freqs`` and ``rope_factors_*``. Goes
out: a dictionary for the configuration, and factors that no configuration can express.
Always holds: a scaling that Hugging Face would compute differently is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from qcompile.errors import SchemeError
from qcompile.hf import FREQUENCY_DIVISORS
from qcompile.schemes.gguf.entries import ROPE_FREQS, ROPE_LONG, ROPE_SHORT, Architecture
from qcompile.schemes.gguf.keys import Keys
from qcompile.schemes.gguf.reader import GGUFFile

# llama.cpp's default for a file without the key.
_THETA = 10000.0


def rope_values(
    architecture: Architecture, file: GGUFFile, keys: Keys, values: Mapping[str, object]
) -> dict[str, object]:
    """The configuration values that describe the rotary embedding.

    Args:
        architecture: the file's architecture.
        file: the file, for its helper tensors.
        keys: its metadata.
        values: configuration values read before, with ``head_dim`` and ``max_position_embeddings``.

    Raises:
        SchemeError: a scaling that cannot be reproduced exactly, or factors of a wrong length.
    """
    if architecture.rope == "local_global":
        return {"rope_parameters": _local_global(keys, values)}
    if architecture.rope == "long":
        return _long(file, keys, values)
    if architecture.rope == "latent":
        return {"rope_parameters": _latent(keys)}
    _need_full_rotation(keys, values)
    scaling = _scaling(keys)
    if architecture.rope == "unrounded" and scaling["rope_type"] == "yarn":
        # gpt-oss does not round the columns between which YaRN blends; no key says so.
        scaling["truncate"] = False
    found: dict[str, object] = {
        "rope_parameters": {"rope_theta": keys.number("rope.freq_base", _THETA), **scaling}
    }
    if architecture.rope == "plain" and ROPE_FREQS in file.tensors:
        found[FREQUENCY_DIVISORS] = _factors(file, ROPE_FREQS, _half(values))
    return found


def _scaling(keys: Keys) -> dict[str, object]:
    """``rope.scaling.*`` of the architectures with one kind of layer."""
    kind = keys.text("rope.scaling.type", "none")
    factor = keys.number("rope.scaling.factor", 0.0)
    attention = keys.number("rope.scaling.attn_factor", 1.0)
    if kind == "linear":
        _need_default(keys, "rope.scaling.attn_factor", attention, 1.0)
        keys.get("rope.scaling.original_context_length")  # has no part in linear scaling
        return {"rope_type": "linear", "factor": _positive(keys, "rope.scaling.factor", factor)}
    if kind == "yarn":
        return _yarn(keys, _positive(keys, "rope.scaling.factor", factor), attention)
    if kind != "none":
        raise keys.wrong("rope.scaling.type", kind, "none, linear or yarn")
    _need_default(keys, "rope.scaling.attn_factor", attention, 1.0)
    if factor not in (0.0, 1.0):
        raise keys.wrong("rope.scaling.factor", factor, "a scaling type that uses it")
    keys.get("rope.scaling.original_context_length")  # has no part without scaling
    return {"rope_type": "default"}


def _yarn(keys: Keys, factor: float, attention: float) -> dict[str, object]:
    """YaRN, https://arxiv.org/abs/2309.00071, as llama.cpp and Hugging Face both compute it."""
    multiplier = "rope.scaling.yarn_log_multiplier"
    _need_default(keys, multiplier, keys.number(multiplier, 0.0), 0.0)
    # llama.cpp multiplies the file's factor with YaRN's own magnitude correction.
    magnitude = attention * (0.1 * math.log(max(factor, 1.0)) + 1.0)
    return {**_yarn_blend(keys, factor), "attention_factor": magnitude}


def _yarn_blend(keys: Keys, factor: float) -> dict[str, object]:
    """YaRN without its correction of magnitudes."""
    for key in ("rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor"):
        _need_default(keys, key, keys.number(key, 1.0), 1.0)
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": keys.integer("rope.scaling.original_context_length"),
        "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0),
    }


def _latent(keys: Keys) -> dict[str, object]:
    """DeepSeek: YaRN whose correction of magnitudes is in the attention's scale.

    The converter stores a tenth of the configuration's ``mscale_all_dim``, and llama.cpp takes
    ``mscale`` for the same number, as it is in the published models. Without the key llama.cpp
    computes what no Hugging Face model does.
    """
    theta = {"rope_theta": keys.number("rope.freq_base", _THETA)}
    if keys.text("rope.scaling.type", "none") != "yarn":
        return {**theta, **_scaling(keys)}
    factor = _positive(keys, "rope.scaling.factor", keys.number("rope.scaling.factor", 0.0))
    attention, key = keys.number("rope.scaling.attn_factor", 1.0), "rope.scaling.attn_factor"
    _need_default(keys, key, attention, 1.0)
    key = "rope.scaling.yarn_log_multiplier"
    mscale = 10 * _positive(keys, key, keys.number(key))
    both = {"mscale": mscale, "mscale_all_dim": mscale}
    return {**theta, **_yarn_blend(keys, factor), **both}


def _local_global(keys: Keys, values: Mapping[str, object]) -> dict[str, object]:
    """Gemma 3: sliding layers keep an unscaled embedding with a base of their own."""
    _need_full_rotation(keys, values)
    kind = keys.text("rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise keys.wrong("rope.scaling.type", kind, "none or linear")
    scaling = _scaling(keys)
    return {
        "full_attention": {"rope_theta": keys.number("rope.freq_base"), **scaling},
        "sliding_attention": {
            "rope_type": "default",
            "rope_theta": keys.number("rope.freq_base_swa", _THETA),
        },
    }


def _long(file: GGUFFile, keys: Keys, values: Mapping[str, object]) -> dict[str, object]:
    """Phi-3: a part of each head rotates, and long models have two lists of factors."""
    head = _integer(values, "head_dim")
    rotated = keys.integer("rope.dimension_count", head)
    # The configuration has the fraction only, and the model rounds its product with head down.
    if rotated > head or rotated % 2 or int(head * (rotated / head)) != rotated:
        raise keys.wrong("rope.dimension_count", rotated, f"an even number up to {head}")
    context = _integer(values, "max_position_embeddings")
    trained = keys.integer("rope.scaling.original_context_length", context)
    rope: dict[str, object] = {
        "rope_type": "default",
        "rope_theta": keys.number("rope.freq_base", _THETA),
        "partial_rotary_factor": rotated / head,
    }
    attention = keys.number("rope.scaling.attn_factor", 1.0)
    kind = keys.text("rope.scaling.type", "longrope")
    if kind not in ("none", "longrope"):
        raise keys.wrong("rope.scaling.type", kind, "longrope")
    if ROPE_LONG in file.tensors or ROPE_SHORT in file.tensors:
        rope |= {
            "rope_type": "longrope",
            "long_factor": _factors(file, ROPE_LONG, rotated // 2),
            "short_factor": _factors(file, ROPE_SHORT, rotated // 2),
            "attention_factor": attention,
            "factor": max(1.0, context / trained),
            "original_max_position_embeddings": trained,
        }
    else:
        _need_default(keys, "rope.scaling.attn_factor", attention, 1.0)
    return {"rope_parameters": rope, "original_max_position_embeddings": trained}


def _factors(file: GGUFFile, name: str, count: int) -> list[float]:
    weight = file.weight(name)
    if weight.shape != (count,):
        raise SchemeError(
            weight.source,
            f"shape {weight.shape}",
            f"({count},): one factor for each pair of rotated columns",
            "convert the file again",
        )
    factors: list[float] = weight.dequantize().tolist()
    if not all(0 < factor < math.inf for factor in factors):
        raise SchemeError(
            weight.source, "factors that are not positive", "positive numbers", "convert again"
        )
    return factors


def _need_full_rotation(keys: Keys, values: Mapping[str, object]) -> None:
    head = _integer(values, "head_dim")
    rotated = keys.integer("rope.dimension_count", head)
    if rotated != head:
        raise keys.wrong("rope.dimension_count", rotated, f"{head}, the size of a head")


def _need_default(keys: Keys, key: str, value: float, default: float) -> None:
    if value != default:
        raise keys.wrong(key, value, f"{default}, or no such key")


def _positive(keys: Keys, key: str, value: float) -> float:
    if value <= 0:
        raise keys.wrong(key, value, "a positive factor")
    return value


def _half(values: Mapping[str, object]) -> int:
    return _integer(values, "head_dim") // 2


def _integer(values: Mapping[str, object], name: str) -> int:
    value = values[name]
    assert isinstance(value, int)
    return value
