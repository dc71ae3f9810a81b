"""What a quantized weight means, apart from how its bytes lie.

Comes in: facts a scheme read from its headers. Goes out: one frozen spec per weight.
Always holds: two weights with equal specs and equal decoded parts are the same matrix, whatever
scheme wrote them; a spec never mentions a scheme, a file or a device.

A weight is a matrix ``w[n, k]`` of N output rows and K input columns. ``g(k)`` is ``k // group``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

AffineForm = Literal["symmetric", "zero", "offset"]


@dataclass(frozen=True)
class AffineSpec:
    """Evenly spaced values: an unsigned code, a scale, and a zero or an offset per group.

    ======== ==================================================================
    form     value
    ======== ==================================================================
    symmetric ``scale[n, g] * (code[n, k] - 2**(bits - 1))``
    zero      ``scale[n, g] * (code[n, k] - zero[n, g])``, zero an integer
    offset    ``scale[n, g] * code[n, k] + offset[n, g]``, offset a float
    ======== ==================================================================

    Attributes:
        bits: width of a code, 1 to 8.
        group: input columns that share a scale; K for a per-channel scale.
        form: which of the three formulas above.
        scale: dtype in which the scales are exact.
        order: ``sequential`` when ``g(k) = k // group``, ``indexed`` when ``g(k)`` is stored.
    """

    bits: int
    group: int
    form: AffineForm
    scale: torch.dtype = torch.float32
    order: Literal["sequential", "indexed"] = "sequential"

    def __str__(self) -> str:
        tail = "" if self.order == "sequential" else " act-order"
        return f"uint{self.bits} g{self.group} {self.form}{tail}"


@dataclass(frozen=True)
class LookupSpec:
    """Values from a small table: ``scale[n, g] * table[code[n, k]]``.

    Attributes:
        bits: width of a code; the table has at most ``2**bits`` entries.
        group: input columns that share a scale.
        table: the values, every one an integer from -128 to 127 (a common factor lives in the
            scale), so that a kernel may hold the table in bytes.
        scale: dtype in which the scales are exact.
    """

    bits: int
    group: int
    table: tuple[int, ...]
    scale: torch.dtype = torch.float32

    def __str__(self) -> str:
        return f"lookup{self.bits} g{self.group}"


@dataclass(frozen=True)
class BlockSpec:
    """Values packed in self-contained blocks of bytes, decoded by a function of the block.

    Attributes:
        type: name of the block type, for instance ``q4_k``.
        elements: columns in a block. K is always a multiple of it.
        bytes: bytes in a block.
        exact: the affine or lookup spec that describes the same float32 values bit for bit, or
            None where there is none.
    """

    type: str
    elements: int
    bytes: int
    exact: AffineSpec | LookupSpec | None = field(default=None, compare=False)

    def as_affine(self) -> AffineSpec | None:
        """The affine spec with the same float32 values, where one exists."""
        return self.exact if isinstance(self.exact, AffineSpec) else None

    def as_lookup(self) -> LookupSpec | None:
        """The lookup spec with the same float32 values, where one exists."""
        return self.exact if isinstance(self.exact, LookupSpec) else None

    def __str__(self) -> str:
        return self.type


@dataclass(frozen=True)
class FloatSpec:
    """Plain numbers of one dtype: the checkpoint did not quantize this tensor."""

    dtype: torch.dtype

    def __str__(self) -> str:
        return str(self.dtype).removeprefix("torch.")


Spec = AffineSpec | LookupSpec | BlockSpec | FloatSpec


def is_quantized(spec: Spec) -> bool:
    """Whether a weight of this spec has to be decoded before it is a matrix of floats."""
    return not isinstance(spec, FloatSpec)
