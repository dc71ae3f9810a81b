"""What a run of blocks holds once its bits are taken apart.

Comes in: uint8 ``[B, bytes]``, one block a row. Goes out: codes, scales and perhaps offsets, one
group after another. Always holds: nothing is rounded here; a part is a bit field, or a product of
bit fields that float32 holds exactly.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Unpacked:
    """The parts of B blocks of E elements in G groups.

    Attributes:
        codes: uint8 ``[B, E]``.
        scale: float16 or float32 ``[B, G]``.
        offset: float32 ``[B, G]`` for the affine form *offset*, else None.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor | None = None


def field(blocks: torch.Tensor, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
    """Bytes ``start`` to ``stop`` of every block as numbers, ``[B, (stop - start) / itemsize]``.

    >>> field(torch.tensor([[9, 0, 0x3C]], dtype=torch.uint8), 1, 3, torch.float16).tolist()
    [[1.0]]
    """
    # A copy, because a view of other width needs an aligned start and blocks have odd sizes.
    part = blocks[:, start:stop].clone(memory_format=torch.contiguous_format)
    return part.view(dtype)


def shifted(values: torch.Tensor, shifts: tuple[int, ...], mask: int) -> torch.Tensor:
    """Bit fields of every number: ``[..., n]`` to ``[..., len(shifts), n]``.

    >>> shifted(torch.tensor([0x21, 0x43], dtype=torch.uint8), (0, 4), 15).tolist()
    [[1, 3], [2, 4]]
    """
    out = values.new_empty((*values.shape[:-1], len(shifts), values.shape[-1]))
    for place, shift in enumerate(shifts):
        part = out.select(-2, place)
        if shift:
            torch.bitwise_right_shift(values, shift, out=part)
            part.bitwise_and_(mask)
        else:
            torch.bitwise_and(values, mask, out=part)
    return out


def fields_of(values: torch.Tensor, shifts: tuple[int, ...], mask: int) -> torch.Tensor:
    """Bit fields of every number, side by side: ``[..., n]`` to ``[..., n * len(shifts)]``.

    >>> fields_of(torch.tensor([0o21, 0o43]), (0, 3), 7).tolist()
    [1, 2, 3, 4]
    """
    return shifted(values, shifts, mask).transpose(-1, -2).flatten(-2)


def pick(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """``table[index]`` for a table of one dimension: several times faster than indexing."""
    flat = index.reshape(-1).to(torch.int32)
    return table.to(index.device).index_select(0, flat).view(index.shape)


def spread(packed: torch.Tensor, bits: int, step: int = 1) -> torch.Tensor:
    """The fields of every byte, low bits first, each times ``step``.

    Args:
        packed: uint8 ``[B, n]``.
        bits: width of a field: 1, 2 or 4.
        step: a factor that keeps the products below 256.

    Returns:
        uint8 ``[B, n * 8 / bits]``.

    >>> spread(torch.tensor([[0x21, 0x43]], dtype=torch.uint8), 4).tolist()
    [[1, 2, 3, 4]]
    """
    return pick(_spread_table(bits, step), packed).view(torch.uint8)


@functools.cache
def _spread_table(bits: int, step: int) -> torch.Tensor:
    # The device is named because a caller may have another default, and the table is kept.
    byte = torch.arange(256, device="cpu")[:, None]
    fields = (byte >> torch.arange(0, 8, bits, device="cpu")) & ((1 << bits) - 1)
    wide = {1: torch.int64, 2: torch.int32, 4: torch.int16}[bits]
    return (fields * step).to(torch.uint8).view(wide).flatten()
