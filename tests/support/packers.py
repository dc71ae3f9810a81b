"""Checkpoint folders written bit by bit, apart from everything that reads them.

Comes in: whole numbers, one per weight. Goes out: words as the formats store them, tensors under
the names that the formats give them, folders with a config.
Always holds: a packed weight comes with the float32 matrix it means, computed in numpy from the
numbers that went in and never from the words that came out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Config = dict[str, Any]
FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}


@dataclass(frozen=True)
class Packed:
    """One layer of a checkpoint.

    Attributes:
        tensors: what is stored, by the last part of its name.
        exact: what it means: float32 ``[N, K]``.
        config: keys of the quantization config that go with it.
    """

    tensors: dict[str, torch.Tensor]
    exact: torch.Tensor
    config: Config = field(default_factory=dict)

    def without(self, *names: str) -> Packed:
        """The same layer with some of its tensors left out."""
        kept = {name: value for name, value in self.tensors.items() if name not in names}
        return replace(self, tensors=kept)

    def with_tensors(self, **tensors: torch.Tensor) -> Packed:
        """The same layer with some tensors added or replaced; the meaning is not touched."""
        return replace(self, tensors={**self.tensors, **tensors})

    def with_config(self, **keys: Any) -> Packed:
        """The same layer under a config that says something else."""
        return replace(self, config={**self.config, **keys})


# **** bits ****


def stream(codes: Ints, bits: int) -> torch.Tensor:
    """Codes ``[rows, n]`` as one run of bits a row: int32 ``[rows, ceil(n * bits / 32)]``.

    Bit ``b`` of code ``i`` is bit ``(i * bits + b) % 32`` of word ``(i * bits + b) // 32``, so a
    code may lie in two words. Bits that no code owns are 0.

    >>> hex(stream(np.array([[0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2]]), 3)[0, 0].item() & 0xFFFFFFFF)
    '0x88fac688'
    """
    rows, count = codes.shape
    words: Ints = np.zeros((rows, -(-count * bits // 32)), np.int64)
    for column in range(count):
        for bit in range(bits):
            place = column * bits + bit
            words[:, place // 32] |= ((codes[:, column] >> bit) & 1) << (place % 32)
    return _int32(words)


def whole_words(codes: Ints, bits: int) -> torch.Tensor:
    """Codes ``[rows, n]`` with ``32 // bits`` of them in a word and the rest of the word 0."""
    rows, count = codes.shape
    each = 32 // bits
    words: Ints = np.zeros((rows, -(-count // each)), np.int64)
    for column in range(count):
        words[:, column // each] |= codes[:, column] << (column % each * bits)
    return _int32(words)


def read_stream(words: torch.Tensor, bits: int, count: int) -> Ints:
    """The inverse of ``stream``: codes ``[rows, count]``."""
    rows = words.numpy().astype(np.int64) & 0xFFFFFFFF
    codes: Ints = np.zeros((rows.shape[0], count), np.int64)
    for column in range(count):
        for bit in range(bits):
            place = column * bits + bit
            codes[:, column] |= ((rows[:, place // 32] >> (place % 32)) & 1) << bit
    return codes


def _int32(words: Ints) -> torch.Tensor:
    return torch.from_numpy(words.astype(np.uint32).view(np.int32).copy())


# **** numbers ****


def random_codes(n: int, k: int, bits: int, seed: int = 0) -> Ints:
    """Codes ``[N, K]`` over their whole range; the first two are its ends."""
    codes: Ints = np.random.default_rng([seed, n, k, bits]).integers(0, 1 << bits, (n, k))
    codes[0, :2] = 0, (1 << bits) - 1
    return codes


def random_scales(n: int, groups: int, dtype: str = "F16", seed: int = 0) -> torch.Tensor:
    """Scales ``[N, G]`` of both signs in their stored dtype, a subnormal and a zero among them."""
    drawn = np.random.default_rng([seed, n, groups]).normal(0, 0.02, (n, groups))
    scales = torch.from_numpy(drawn).to(FLOATS[dtype])
    if scales.numel() > 4:
        scales.view(-1)[1:3] = torch.tensor([0.0, 6e-8]).to(scales.dtype)
    return scales


def affine(codes: Ints, zeros: Ints, scales: torch.Tensor, groups: Ints) -> torch.Tensor:
    """``scale[n, g(k)] * (code[n, k] - zero[n, g(k)])`` in float32, one rounding.

    Args:
        codes: ``[N, K]``.
        zeros: ``[N, G]``.
        scales: ``[N, G]`` in the stored dtype.
        groups: ``g(k)``, ``[K]``.
    """
    steps = (codes - zeros[:, groups]).astype(np.float32)
    return torch.from_numpy(scales.float().numpy()[:, groups] * steps)


def group_of(k: int, group: int) -> Ints:
    """``k // group`` for every column; one group for -1."""
    return np.arange(k) // (k if group == -1 else group)


# **** folders ****

Layers = Mapping[str, Packed | torch.Tensor]


def stored(layers: Layers) -> dict[str, torch.Tensor]:
    """Every tensor under its full name; plain tensors are named in full already."""
    found: dict[str, torch.Tensor] = {}
    for name, layer in layers.items():
        if isinstance(layer, torch.Tensor):
            found[name] = layer.contiguous()
        else:
            found |= {f"{name}.{last}": value.contiguous() for last, value in layer.tensors.items()}
    return found


def write_folder(
    folder: Path,
    layers: Layers,
    quantization: Config | None = None,
    model: Config | None = None,
    shards: int = 1,
) -> Path:
    """Write ``config.json`` and safetensors files.

    Args:
        folder: where; made if it is not there.
        layers: packed layers by module name, plain tensors by their full name.
        quantization: its ``quantization_config``; that of the first packed layer when None.
        model: the other keys of the config.
        shards: how many files the tensors are dealt to; more than one are named by an index.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if quantization is None:
        quantization = next(layer.config for layer in layers.values() if isinstance(layer, Packed))
    config = {**(model or {}), "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    tensors = stored(layers)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(tensors.items())[shard::shards])
        save_file(part, folder / name, {"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    write_index(folder, weight_map)
    return folder


def write_index(folder: Path, weight_map: Mapping[str, str]) -> None:
    content = {"metadata": {"total_size": 0}, "weight_map": dict(weight_map)}
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps(content), encoding="utf-8")


def columns(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """The columns of a matrix in another order."""
    return tensor[:, torch.tensor(order)].contiguous()
