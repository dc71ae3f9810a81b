"""Compressed-tensors layers of whole numbers: ``pack-quantized`` and ``int-quantized``.

Comes in: codes ``[N, K]``, zeros ``[N, G]``, scales ``[N, G]``, all codes unsigned. Goes out: a
packed layer.
Always holds: ``pack-quantized`` stores ``weight_packed`` int32 ``[N, words]`` along K,
``weight_zero_point`` int32 ``[words of N, G]`` along dim 0, ``weight_scale`` ``[N, G]``,
``weight_shape`` int64 ``[2]``; signed numbers are stored plus ``2**(bits - 1)``, so unsigned codes
are stored as they are. ``int-quantized`` stores the signed numbers themselves as int8 ``weight``
``[N, K]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from support.packers import (
    Config,
    Ints,
    Packed,
    affine,
    group_of,
    random_codes,
    random_scales,
    stream,
    whole_words,
)

Packing = Literal["dense", "words"]
ActOrder = Literal["group", "weight", "static"]


@dataclass(frozen=True)
class Compressed:
    """What is to be written.

    Attributes:
        group: -1 for a scale per channel.
        packing: ``dense``, a run of bits, as releases from 0.20 on write all widths; ``words``,
            whole codes in every word, as older ones did. They differ for 3, 5, 6 and 7 bits.
        actorder: ``group`` writes ``weight_g_idx``; ``static`` and ``weight`` do not.
        activations: whether the config says that inputs are quantized too.
    """

    bits: int = 4
    group: int = 64
    symmetric: bool = True
    packing: Packing = "dense"
    actorder: ActOrder | None = None
    scale: str = "BF16"
    bias: bool = False
    activations: bool = False

    @property
    def version(self) -> str:
        return "0.20.0" if self.packing == "dense" else "0.9.4"


def weights_config(bits: int, type: str, strategy: str, **keys: Any) -> Config:
    """The ``weights`` of a config group."""
    known = {
        "num_bits": bits,
        "type": type,
        "strategy": strategy,
        "group_size": None,
        "symmetric": True,
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    return {**known, **keys}


def compressed_config(
    format: str,
    groups: dict[str, tuple[list[str], Config]],
    ignore: tuple[str, ...] = (),
    activations: Config | None = None,
    version: str = "0.20.0",
) -> Config:
    """A quantization config: targets and ``weights`` by group name."""
    made = {
        name: {
            "targets": targets,
            "weights": weights,
            "input_activations": activations,
            "output_activations": None,
            "format": format,
        }
        for name, (targets, weights) in groups.items()
    }
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": made,
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "sparsity_config": {},
        "transform_config": {},
        "version": version,
    }


def dynamic_activations(type: str = "int", bits: int = 8) -> Config:
    """Inputs that are quantized token by token while the model runs."""
    keys: Config = {"dynamic": True, "observer": None}
    return {**weights_config(bits, type, "token"), **keys}


def integer_weights(what: Compressed) -> Config:
    """The ``weights`` of a config group for a packed or plain integer layer."""
    strategy = "channel" if what.group == -1 else "group"
    return weights_config(
        what.bits,
        "int",
        strategy,
        group_size=None if what.group == -1 else what.group,
        symmetric=what.symmetric,
        actorder=what.actorder,
    )


@dataclass(frozen=True)
class _Numbers:
    codes: Ints
    zeros: Ints
    scales: torch.Tensor
    groups: Ints


def _numbers(n: int, k: int, what: Compressed, seed: int) -> _Numbers:
    groups = group_of(k, what.group)
    if what.actorder == "group":
        groups = np.random.default_rng(seed).permutation(groups)
    count = int(groups.max()) + 1
    zeros = np.random.default_rng([seed, 7]).integers(0, 1 << what.bits, (n, count))
    zeros[0, 0], zeros[-1, -1] = 0, (1 << what.bits) - 1
    if what.symmetric:
        zeros[:] = 1 << (what.bits - 1)
    scales = random_scales(n, count, what.scale, seed)
    return _Numbers(random_codes(n, k, what.bits, seed), zeros, scales, groups)


def pack_quantized(n: int, k: int, what: Compressed, seed: int = 0) -> Packed:
    """A ``pack-quantized`` layer of random numbers."""
    made = _numbers(n, k, what, seed)
    pack = stream if what.packing == "dense" else whole_words
    tensors = {
        "weight_packed": pack(made.codes, what.bits),
        "weight_scale": made.scales,
        "weight_shape": torch.tensor([n, k]),
    }
    if not what.symmetric:
        tensors["weight_zero_point"] = pack(made.zeros.T, what.bits).T.contiguous()
    if what.actorder == "group":
        tensors["weight_g_idx"] = torch.from_numpy(made.groups.astype(np.int32))
    return _layer(tensors, made, what, "pack-quantized", seed)


def int_quantized(n: int, k: int, what: Compressed, seed: int = 0) -> Packed:
    """An ``int-quantized`` layer of random numbers: W8A8 without the activations."""
    made = _numbers(n, k, what, seed)
    middle = 1 << (what.bits - 1)
    tensors = {
        "weight": torch.from_numpy((made.codes - middle).astype(np.int8)),
        "weight_scale": made.scales,
    }
    if not what.symmetric:
        tensors["weight_zero_point"] = torch.from_numpy((made.zeros - middle).astype(np.int8))
    return _layer(tensors, made, what, "int-quantized", seed)


def _layer(
    tensors: dict[str, torch.Tensor], made: _Numbers, what: Compressed, format: str, seed: int
) -> Packed:
    if what.bias:
        rows = made.codes.shape[0]
        tensors["bias"] = random_scales(rows, 1, what.scale, seed + 1)[:, 0].contiguous()
    config = compressed_config(
        format,
        {"group_0": (["Linear"], integer_weights(what))},
        activations=dynamic_activations() if what.activations else None,
        version=what.version,
    )
    exact = affine(made.codes, made.zeros, made.scales, made.groups)
    return Packed(tensors, exact, config)
