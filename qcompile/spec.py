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
GroupOrder = Literal["sequential", "permuted", "indexed"]


def _nested(columns: int) -> str:
    return f" nested {columns}" if columns else ""


@dataclass(frozen=True)
class AffineSpec:
    """Evenly spaced values: an unsigned code, a scale, and a zero or an offset per group.

    ========= ==================================================================
    form      value
    ========= ==================================================================
    symmetric ``scale[n, g] * (code[n, k] - 2**(bits - 1))``
    zero      ``scale[n, g] * (code[n, k] - zero[n, g])``, zero an integer
    offset    ``scale[n, g] * code[n, k] + offset[n, g]``, offset a float
    ========= ==================================================================

    Attributes:
        bits: width of a code, 1 to 8.
        group: input columns that share a scale; K for a per-channel scale.
        form: which of the three formulas above.
        scale: dtype in which the scales are exact.
        order: ``sequential`` when ``g(k) = k // group``. Otherwise ``g(k)`` is stored:
            ``permuted`` when every group has ``group`` columns (the last one what is left), so that
            sorting the columns by group makes them sequential; ``indexed`` for any other index.
        nested: columns that share a float16 factor, where a scale is that factor times a whole
            number of 8 bits (and an offset a factor of its own times such a number); 0 where scales
            stand alone. Only layouts that store the two apart have such specs.
    """

    bits: int
    group: int
    form: AffineForm
    scale: torch.dtype = torch.float32
    order: GroupOrder = "sequential"
    nested: int = 0

    def __str__(self) -> str:
        tail = {"sequential": "", "permuted": " act-order", "indexed": " indexed"}[self.order]
        return f"uint{self.bits} g{self.group} {self.form}{tail}{_nested(self.nested)}"


@dataclass(frozen=True)
class LookupSpec:
    """Values from a small table: ``scale[n, g] * table[code[n, k]]``.

    Attributes:
        bits: width of a code; the table has at most ``2**bits`` entries.
        group: input columns that share a scale.
        table: the values, every one an integer from -128 to 127 (a common factor lives in the
            scale), so that a kernel may hold the table in bytes.
        scale: dtype in which the scales are exact.
        nested: as in ``AffineSpec``.
    """

    bits: int
    group: int
    table: tuple[int, ...]
    scale: torch.dtype = torch.float32
    nested: int = 0

    def __str__(self) -> str:
        return f"lookup{self.bits} g{self.group}{_nested(self.nested)}"


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
class ScaledSpec:
    """Narrow floats with a scale: ``scale[n, g] * float(data[n, k])``.

    Attributes:
        dtype: dtype of the stored numbers, for instance ``torch.float8_e4m3fn``.
        group: input columns that share a scale; K for a per-channel scale.
        scale: dtype in which the scales are exact.
    """

    dtype: torch.dtype
    group: int
    scale: torch.dtype = torch.float32

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} g{self.group}"


@dataclass(frozen=True)
class FloatSpec:
    """Plain numbers of one dtype: the checkpoint did not quantize this tensor."""

    dtype: torch.dtype

    def __str__(self) -> str:
        return str(self.dtype).removeprefix("torch.")


MatrixSpec = AffineSpec | LookupSpec | BlockSpec | ScaledSpec | FloatSpec
Role = Literal["gate", "up", "gate_up", "down"]


@dataclass(frozen=True)
class RoleSpec:
    """The matrices that play one part in every expert of a layer.

    Attributes:
        role: ``gate``, ``up``, both in one (gate rows first), or ``down``.
        spec: meaning of each matrix.
        layout: name of the layout of each matrix.
        rows: N of each matrix.
        columns: K of each matrix.
    """

    role: Role
    spec: MatrixSpec
    layout: str
    rows: int
    columns: int


@dataclass(frozen=True)
class ExpertsSpec:
    """Matrices of the experts of a layer: each role has one spec, the same for all experts.

    An expert is ``down @ act(gate @ x, up @ x)``, or ``down @ act(up @ x)`` without a gate.
    """

    roles: tuple[RoleSpec, ...]

    def __str__(self) -> str:
        by_spec: dict[str, list[str]] = {}
        for role in self.roles:
            by_spec.setdefault(str(role.spec), []).append(role.role)
        if len(by_spec) == 1:
            return next(iter(by_spec))
        return ", ".join(f"{'/'.join(roles)} {spec}" for spec, roles in by_spec.items())


Spec = MatrixSpec | ExpertsSpec


@dataclass(frozen=True)
class ActivationSpec:
    """How a checkpoint expects the input of a weight to be quantized, where it does.

    Attributes:
        dtype: dtype of the quantized activations, ``torch.int8`` or ``torch.float8_e4m3fn``.
        per: what shares a scale.
        dynamic: whether the scale is computed from each input; else the checkpoint stores it.
        symmetric: whether zero is stored as zero.
    """

    dtype: torch.dtype
    per: Literal["token", "tensor", "group"]
    dynamic: bool = True
    symmetric: bool = True

    def __str__(self) -> str:
        when = "dynamic" if self.dynamic else "static"
        return f"{str(self.dtype).removeprefix('torch.')} per {self.per}, {when}"


def is_quantized(spec: Spec) -> bool:
    """Whether a weight of this spec has to be decoded before it is a matrix of floats."""
    if isinstance(spec, ExpertsSpec):
        return any(is_quantized(role.spec) for role in spec.roles)
    return not isinstance(spec, FloatSpec)
