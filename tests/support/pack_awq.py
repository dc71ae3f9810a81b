"""AWQ layers in the ``gemm`` and the ``gemv`` layout.

Comes in: codes ``[N, K]``, zeros ``[N, G]``, scales ``[N, G]``. Goes out: a packed layer.
Always holds: zeros are stored as they are. ``gemm``: ``qweight`` int32 ``[K, N / 8]``, ``qzeros``
``[G, N / 8]``, ``scales`` ``[G, N]``, and the nibble at shift ``4 * i`` is column ``ORDER[i]`` of
the eight in its word. ``gemv``: ``qweight`` ``[N, K / 8]``, ``qzeros`` ``[N, width]``, ``scales``
``[N, 8 * width]``, nibbles in their own order, groups padded with zeros.

N that is no multiple of 8 is not written for ``gemm``: the writer refuses it.
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
    whole_words,
)

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


Version = Literal["gemm", "gemv"]


@dataclass(frozen=True)
class Awq:
    """What is to be written. ``zero_point`` False means that every zero point is 8."""

    group: int = 64
    zero_point: bool = True
    version: Version = "gemm"
    scale: str = "F16"
    bias: bool = False
    old_names: bool = False

    @property
    def config(self) -> Config:
        bits, group = ("w_bit", "q_group_size") if self.old_names else ("bits", "group_size")
        return {
            "quant_method": "awq",
            bits: 4,
            group: self.group,
            "zero_point": self.zero_point,
            "version": self.version,
        }


def interleave(rows: Ints) -> torch.Tensor:
    """Codes ``[rows, n]`` as int32 ``[rows, n / 8]``, nibbles in AWQ's order.

    >>> hex(interleave(np.arange(8)[None]).item())
    '0x75316420'
    """
    eights = rows.reshape(rows.shape[0], -1, 8)
    return whole_words(eights[..., ORDER].reshape(rows.shape), 4)


def padded_width(k: int, group: int) -> int:
    """Words of zero points in a row of the ``gemv`` layout."""
    step = {32: 4, 64: 2}.get(group, 1)
    words = -(-(k // group) // 8)
    return -(-words // step) * step


def awq(
    n: int,
    k: int,
    what: Awq,
    seed: int = 0,
    codes: Ints | None = None,
    zeros: Ints | None = None,
    scales: torch.Tensor | None = None,
) -> Packed:
    """An AWQ layer of random numbers, or of those that are given."""
    count = -(-k // what.group)
    if codes is None:
        codes = random_codes(n, k, 4, seed)
    if zeros is None:
        zeros = np.random.default_rng([seed, 7]).integers(0, 16, (n, count))
        zeros[0, 0], zeros[-1, -1] = 0, 15
        if not what.zero_point:
            zeros[:] = 8
    if scales is None:
        scales = random_scales(n, count, what.scale, seed)
    make = _gemm if what.version == "gemm" else _gemv
    tensors = make(codes, zeros, scales, what.group)
    if what.bias:
        tensors["bias"] = random_scales(n, 1, what.scale, seed + 1)[:, 0].contiguous()
    exact = affine(codes, zeros, scales, group_of(k, what.group))
    return Packed(tensors, exact, what.config)


def _gemm(codes: Ints, zeros: Ints, scales: torch.Tensor, group: int) -> dict[str, torch.Tensor]:
    assert codes.shape[0] % 8 == 0, "AutoAWQ refuses such an N"
    return {
        "qweight": interleave(codes.T),
        "qzeros": interleave(zeros.T),
        "scales": scales.T.contiguous(),
    }


def _gemv(codes: Ints, zeros: Ints, scales: torch.Tensor, group: int) -> dict[str, torch.Tensor]:
    (n, k), groups = codes.shape, zeros.shape[1]
    width = padded_width(k, group)
    wide_zeros, wide_scales = np.zeros((n, 8 * width), np.int64), scales.new_zeros(n, 8 * width)
    wide_zeros[:, :groups], wide_scales[:, :groups] = zeros, scales
    return {
        "qweight": whole_words(codes, 4),
        "qzeros": whole_words(wide_zeros, 4),
        "scales": wide_scales,
    }
