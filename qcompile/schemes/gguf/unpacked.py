"""What a run of blocks holds once its bits are taken apart.

Comes in: uint8 ``[B, bytes]``, one block a row. Goes out: codes, scales and perhaps offsets, one
group after another. Always holds: nothing is rounded here; a part is a bit field, or a product of
bit fields that float32 holds exactly.
"""

from __future__ import annotations

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

    >>> fields_of(torch.tensor([0x21, 0x43], dtype=torch.uint8), (0, 4), 15).tolist()
    [1, 2, 3, 4]
    """
    return shifted(values, shifts, mask).transpose(-1, -2).flatten(-2)
