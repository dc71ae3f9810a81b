"""GPTQ layers, as AutoGPTQ, GPTQModel and AutoRound store them.

Comes in: codes ``[N, K]``, zeros ``[N, G]``, scales ``[N, G]``. Goes out: a packed layer.
Always holds: ``qweight`` int32 ``[K * bits / 32, N]`` is a run of bits along K for every output
column, ``qzeros`` int32 ``[G, ceil(N * bits / 32)]`` a run along N for every group, ``scales``
``[G, N]``, ``g_idx`` int32 ``[K]``.

The writers of real files need N and K to be multiples of 32. Other N are padded here to whole
words with zeros, the only way a reader of the same shapes could take. Other K are not written:
``qweight`` would not say where K ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
)

Zeros = Literal["v1", "v1-gptqmodel", "v1-wrap", "v2", "empty", "absent"]
Order = Literal["absent", "trivial", "permuted", "arbitrary", "zeros"]


@dataclass(frozen=True)
class Gptq:
    """What is to be written.

    Attributes:
        group: -1 for one group; the last group may be short.
        zeros: how zero points are stored: minus one a field at a time as AutoGPTQ does it (``v1``),
            minus one on the whole word as GPTQModel does it, minus one with every field wrapping by
            itself, as they are (``v2``), as a tensor of no elements, or not at all.
        order: what ``g_idx`` says.
        lossy: whether AutoGPTQ's zero points may be 0, which spoils the rest of their word.
    """

    bits: int = 4
    group: int = 64
    sym: bool = False
    zeros: Zeros = "v1"
    order: Order = "trivial"
    scale: str = "F16"
    bias: bool = False
    lossy: bool = False

    @property
    def config(self) -> Config:
        found: Config = {
            "quant_method": "gptq",
            "bits": self.bits,
            "group_size": self.group,
            "sym": self.sym,
            "desc_act": self.order in ("permuted", "arbitrary"),
            "checkpoint_format": "gptq_v2" if self.zeros == "v2" else "gptq",
        }
        if self.zeros == "v1-gptqmodel":
            found["meta"] = {"quantizer": ["gptqmodel:7.7.0"]}
        return found


def group_index(k: int, group: int, order: Order, seed: int = 0) -> Ints:
    """``g(k)`` for every column."""
    plain = group_of(k, group)
    if order == "permuted":
        return np.random.default_rng(seed).permutation(plain)
    if order == "arbitrary":
        return np.random.default_rng(seed).integers(0, int(plain.max()) + 1, k)
    return np.zeros(k, np.int64) if order == "zeros" else plain


def pack_zeros(zeros: Ints, bits: int, how: Zeros) -> torch.Tensor:
    """``qzeros``: int32 ``[G, ceil(N * bits / 32)]`` from zeros ``[N, G]``.

    >>> one = np.array([[8, 0, 5, 9, 3, 7, 12, 1]]).T
    >>> [f"{pack_zeros(one, 4, how).item() & 0xFFFFFFFF:08x}" for how in ("v2", "v1-wrap")]
    ['1c739508', '0b6284f7']
    >>> [f"{pack_zeros(one, 4, how).item() & 0xFFFFFFFF:08x}" for how in ("v1-gptqmodel", "v1")]
    ['0b6283f7', 'fffffff7']
    """
    rows = zeros.T
    mask = (1 << bits) - 1
    if how == "v2":
        return stream(rows, bits)
    if how == "v1-wrap" or (how == "v1-gptqmodel" and bits not in (2, 4, 8)):
        return stream((rows - 1) & mask, bits)
    if how == "v1-gptqmodel":
        ones = sum(1 << (bits * field) for field in range(32 // bits))
        words = stream(rows, bits).numpy().astype(np.int64) - ones
        return torch.from_numpy((words & 0xFFFFFFFF).astype(np.uint32).view(np.int32).copy())
    return _or_of_negatives(rows, bits)


def _or_of_negatives(rows: Ints, bits: int) -> torch.Tensor:
    """AutoGPTQ: ``zero - 1`` as uint32, shifted and ORed, so -1 sets every higher bit of a word."""
    if bits == 3:
        assert rows.min() > 0, "how a -1 spoils the next words is not written down"
        return stream(rows - 1, bits)
    each = 32 // bits
    words: Ints = np.zeros((rows.shape[0], -(-rows.shape[1] // each)), np.int64)
    for column in range(rows.shape[1]):
        lowered = (rows[:, column] - 1) & 0xFFFFFFFF
        words[:, column // each] |= (lowered << (column % each * bits)) & 0xFFFFFFFF
    return torch.from_numpy(words.astype(np.uint32).view(np.int32).copy())


def gptq(
    n: int,
    k: int,
    what: Gptq,
    seed: int = 0,
    codes: Ints | None = None,
    zeros: Ints | None = None,
    scales: torch.Tensor | None = None,
) -> Packed:
    """A GPTQ layer of random numbers, or of those that are given."""
    assert k * what.bits % 32 == 0, "qweight does not say where K ends"
    groups = group_index(k, what.group, what.order, seed)
    count = -(-k // (k if what.group == -1 else what.group))
    if codes is None:
        codes = random_codes(n, k, what.bits, seed)
    if zeros is None:
        zeros = _zeros(n, count, what, seed)
    if scales is None:
        scales = random_scales(n, count, what.scale, seed)
    tensors = {
        "qweight": stream(codes, what.bits).T.contiguous(),
        "scales": scales.T.contiguous(),
    }
    if what.zeros == "empty":
        tensors["qzeros"] = torch.zeros(0, dtype=torch.int32)
    elif what.zeros != "absent":
        tensors["qzeros"] = pack_zeros(zeros, what.bits, what.zeros)
    if what.order != "absent":
        tensors["g_idx"] = torch.from_numpy(groups.astype(np.int32))
    if what.bias:
        tensors["bias"] = random_scales(n, 1, what.scale, seed + 1)[:, 0].contiguous()
    return Packed(tensors, affine(codes, zeros, scales, groups), what.config)


def _zeros(n: int, groups: int, what: Gptq, seed: int) -> Ints:
    if what.sym:
        return np.full((n, groups), 1 << (what.bits - 1))
    if what.zeros == "v1" and not what.lossy:
        return np.random.default_rng([seed, 7]).integers(1, 1 << what.bits, (n, groups))
    drawn: Ints = np.random.default_rng([seed, 7]).integers(0, 1 << what.bits, (n, groups))
    drawn[0, 0], drawn[-1, -1] = 0, (1 << what.bits) - 1
    return drawn


def auto_round_config(packing: str, what: Gptq) -> Config:
    """The quantization config of an AutoRound folder: ``auto_round`` stores zeros as they are."""
    return {
        "quant_method": "auto-round",
        "packing_format": packing,
        "bits": what.bits,
        "group_size": what.group,
        "sym": what.sym,
        "data_type": "int",
        "autoround_version": "0.16.1",
    }
