"""What a kernel is compiled for: how codes lie in words, and what they stand for.

Comes in: a spec and K. Goes out: a ``Coding``, or the number that rules the weight out.
Always holds: the columns of one plane share a scale, so a kernel scales whole planes.

A word has 16 bits and holds one column of several *planes*: runs of ``width`` columns side by
side. Codes of 2, 4 and 8 bits fill one kind of word; 3, 5 and 6 bits are split into a low part of 2
or 4 bits and a high part of 1 or 2 that lies in words of its own, so that no bit is wasted. Of 1
and 7 bits the next width is stored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from qcompile.spec import AffineForm, AffineSpec, LookupSpec, ScaledSpec, Spec

Kind = Literal["code", "table", "float8", "float4"]
WORD = 16
# What a matrix unit multiplies at once; the narrowest plane.
NARROWEST = 16
# Columns of one block of planes: more than this would only be padded.
_LONGEST_BLOCK = 512
# Floats of 4 bits with 2 bits of exponent and 1 of mantissa, times 2.
E2M1_TWICE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_SPLIT = {1: (2, 0), 2: (2, 0), 3: (2, 1), 4: (4, 0), 5: (4, 1), 6: (4, 2), 7: (8, 0), 8: (8, 0)}


@dataclass(frozen=True)
class Coding:
    """See the module's text.

    Attributes:
        low: bits of a code that lie in ``codes``.
        high: bits of a code that lie in ``high``, perhaps none.
        kind: ``code`` for evenly spaced values, ``table`` for codes of ``table``, ``float8`` for
            ``float8_e4m3fn``, ``float4`` for twice E2M1, which bits alone decode.
        form: how the scale is applied, as in ``AffineSpec``; *symmetric* for the other kinds.
        center: what the form *symmetric* subtracts from a code, or from a byte of the table.
        width: columns of a plane: 16, 32 or 64.
        group: columns that share a scale, 0 where a whole row does.
        table: the values of the codes, for the kinds ``table`` and ``float4``.
    """

    low: int
    high: int
    kind: Kind
    form: AffineForm
    center: int
    width: int
    group: int
    table: tuple[int, ...] = ()

    @property
    def planes(self) -> int:
        """Planes of a block: those whose words hold nothing of another block."""
        return WORD // (self.high or self.low)

    @property
    def block(self) -> int:
        """Columns of a block."""
        return self.planes * self.width

    @property
    def words(self) -> int:
        """Words of ``codes`` for a column of a block."""
        return self.planes * self.low // WORD

    @property
    def run(self) -> int:
        """Planes side by side that surely share a scale."""
        if self.group == 0:
            return self.planes
        return math.gcd(self.group // self.width, self.planes)

    def blocks(self, columns: int) -> int:
        """Blocks of a row of this many columns; the last one may be padded."""
        return -(-columns // self.block)


def coding_of(spec: Spec, columns: int) -> Coding | str:
    """How a weight of this spec and K is coded, or why it cannot be."""
    if isinstance(spec, AffineSpec):
        if spec.order == "indexed":
            return "groups of one size are needed; this weight's group index makes them uneven"
        low, high = _SPLIT[spec.bits]
        return _laid(low, high, "code", spec.form, 1 << (spec.bits - 1), spec.group, columns)
    if isinstance(spec, LookupSpec):
        if spec.bits > 4:
            return f"a table for codes of {spec.bits} bits; kernels look up at most 4"
        if min(spec.table) < -127:
            return f"a table with {min(spec.table)}; kernels hold a size of 7 bits and a sign"
        table = (*spec.table, *([0] * (16 - len(spec.table))))
        if min(spec.table) < -127:
            return f"a table with {min(spec.table)}; kernels hold a size of 7 bits and a sign"
        table = (*spec.table, *([0] * (16 - len(spec.table))))
        if table == E2M1_TWICE:
            return _laid(4, 0, "float4", "symmetric", 0, spec.group, columns, table)
        return _laid(4, 0, "table", "symmetric", 128, spec.group, columns, table)
    if isinstance(spec, ScaledSpec):
        if spec.dtype != torch.float8_e4m3fn:
            return f"narrow floats of {spec.dtype}; kernels decode torch.float8_e4m3fn"
        return _laid(8, 0, "float8", "symmetric", 0, spec.group, columns)
    return f"spec {spec} is neither affine, nor a lookup, nor scaled floats"


def _laid(
    low: int,
    high: int,
    kind: Kind,
    form: AffineForm,
    center: int,
    group: int,
    columns: int,
    table: tuple[int, ...] = (),
) -> Coding | str:
    if group >= columns:
        group = 0
    if group % NARROWEST:
        return f"groups of {group} columns; a matrix unit takes {NARROWEST} columns of one scale"
    planes = WORD // (high or low)
    fitting = [
        Coding(low, high, kind, form, center, width, group, table)
        for width in (64, 32, NARROWEST)
        if group % width == 0 and width * planes <= _LONGEST_BLOCK
    ]
    # Wide planes need fewer instructions; padding of more than a sixteenth costs more than that.
    best = fitting[-1].blocks(columns) * fitting[-1].block
    return next(c for c in fitting if c.blocks(columns) * c.block <= max(best, columns * 17 // 16))
