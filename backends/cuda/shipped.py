"""What is compiled ahead of time: launches of every kernel, in every tile of the table.

Comes in: an architecture. Goes out: cases, each a launch that can be made without data.
Always holds: a case calls the code that a graph calls; tiles are those that ``configs`` chooses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from qcompile.backends.cuda import launch
from qcompile.backends.cuda.coding import E2M1_TWICE, Coding
from qcompile.backends.cuda.configs import Config, choose
from qcompile.backends.cuda.layouts import DTYPES, LAYOUTS, coded, layout_name
from qcompile.backends.cuda.triton_experts import LAYOUTS as EXPERTS_LAYOUTS
from qcompile.backends.cuda.triton_experts import layout_name as experts_layout_name
from qcompile.backends.cuda.triton_routed import (
    Facts,
    coding_for,
    down_product,
    facts_of,
    height_for,
    prepared,
    tile_for,
    up_product,
)
from qcompile.backends.rules import name_of
from qcompile.layout import QuantizedTensor, Shape
from qcompile.ops import encode_meaning
from qcompile.spec import AffineSpec, ExpertsSpec, LookupSpec, RoleSpec, ScaledSpec

LinearSpec = AffineSpec | LookupSpec | ScaledSpec
# Rows of the input: one for every height of a tile.
ROWS = (1, 16, 32, 64, 256)
# Experts, and choices that give a block of them each height.
_COUNT = 128
CHOICES = (8, *(_COUNT * rows for rows in (*ROWS[1:4], 128)))
CROWDED = ("w4 g128 zero", "w5 g32 offset q5_k")
_SQUARE, _RAGGED = (4096, 4096), (4000, 4064)
_NIBBLES = tuple(range(-8, 8))

# By what kernels differ in: width, group, form. Names of formats say who has such weights.
SPECS: dict[str, LinearSpec] = {
    "w4 g128": AffineSpec(4, 128, "symmetric"),
    "w4 g128 zero": AffineSpec(4, 128, "zero"),
    "w4 g64": AffineSpec(4, 64, "symmetric"),
    "w4 g32 q4_0": AffineSpec(4, 32, "symmetric"),
    "w4 g32 zero": AffineSpec(4, 32, "zero"),
    "w4 g32 offset q4_k": AffineSpec(4, 32, "offset"),
    "w4 row": AffineSpec(4, 1 << 20, "symmetric"),
    "w2 g64 zero": AffineSpec(2, 64, "zero"),
    "w2 g16 offset q2_k": AffineSpec(2, 16, "offset"),
    "w3 g128 zero": AffineSpec(3, 128, "zero"),
    "w3 g16 q3_k": AffineSpec(3, 16, "symmetric"),
    "w5 g32 offset q5_k": AffineSpec(5, 32, "offset"),
    "w6 g16 q6_k": AffineSpec(6, 16, "symmetric"),
    "w8 g128": AffineSpec(8, 128, "symmetric"),
    "w8 g32 q8_0": AffineSpec(8, 32, "symmetric"),
    "w8 row": AffineSpec(8, 1 << 20, "symmetric"),
    "nf4 g64": LookupSpec(4, 64, _NIBBLES),
    "iq4_nl g32": LookupSpec(4, 32, _NIBBLES),
    "mxfp4 g32": LookupSpec(4, 32, E2M1_TWICE),
    "nvfp4 g16": LookupSpec(4, 16, E2M1_TWICE),
    "float8 row": ScaledSpec(torch.float8_e4m3fn, 1 << 20),
}


@dataclass(frozen=True)
class Case:
    """One launch.

    Attributes:
        name: of the spec.
        spec: of the weight.
        shape: of the weight.
        rows: of the input.
        dtype: of the input.
        bias: whether one is added.
    """

    name: str
    spec: LinearSpec
    shape: Shape
    rows: int
    dtype: torch.dtype
    bias: bool = True

    def __str__(self) -> str:
        n, k = self.shape
        size = "" if self.shape == _SQUARE else f" {n}x{k}"
        return f"{self.name} {name_of(self.dtype)} M{self.rows}{size}"

    @property
    def coding(self) -> Coding:
        """How the weight is coded."""
        return coded(self.spec, self.shape)

    def tile(self, arch: str) -> Config | None:
        """The tile on an architecture."""
        return choose(arch, self.coding, *self.shape, self.rows)

    def launch(self, arch: str) -> None:
        """Launch on tensors without values."""
        n, k = self.shape
        x = torch.empty(self.rows, k, dtype=self.dtype)
        parts = _empty(self.spec, self.shape, self.dtype)
        bias = torch.empty(n, dtype=self.dtype) if self.bias else None
        config = choose(arch, self.coding, n, k, self.rows)
        launch.linear(x, parts, self.coding, self.shape, bias, config, asm=True)


@dataclass(frozen=True)
class RowsCase:
    """Rows of a weight as floats: those that ids name, or a run of all.

    Attributes:
        name: of the spec.
        spec: of the weight.
        shape: of the weight.
        gather: whether ids name them.
        dtype: of the result.
    """

    name: str
    spec: LinearSpec
    shape: Shape
    gather: bool
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.name} {name_of(self.dtype)} {'lookup' if self.gather else 'decode'}"

    @property
    def coding(self) -> Coding:
        """How the weight is coded."""
        return coded(self.spec, self.shape)

    def tile(self, arch: str) -> Config | None:
        """None: nothing is multiplied."""
        return None

    def launch(self, arch: str) -> None:
        """Launch on tensors without values."""
        parts = _empty(self.spec, self.shape, self.dtype)
        wanted = torch.empty(8, dtype=torch.int64) if self.gather else range(self.shape[0])
        launch.rows(parts, self.coding, self.shape, wanted, self.dtype, asm=True)


@dataclass(frozen=True)
class ExpertsCase:
    """The launches of all products of a layer of experts.

    Attributes:
        name: of the specs.
        spec: of all experts, its roles in the planar layout.
        shape: of the whole weight.
        choices: experts chosen by all tokens together.
        dtype: of the input.
        bias: whether products add one.
        activation: text of what is between the products.
    """

    name: str
    spec: ExpertsSpec
    shape: Shape
    choices: int
    dtype: torch.dtype
    bias: bool = False
    activation: str = "gated silu"

    def __str__(self) -> str:
        return f"{self.name} {name_of(self.dtype)} {self.shape[0]} experts C{self.choices}"

    @property
    def facts(self) -> Facts:
        """The roles."""
        return facts_of(self._meaning)

    @property
    def coding(self) -> Coding:
        """How the first product's weight is coded."""
        return coding_for(self.facts.up[0])

    @property
    def _meaning(self) -> str:
        layout = experts_layout_name(self.dtype)
        return encode_meaning(QuantizedTensor(self.spec, layout, self.shape, {}))

    def tile(self, arch: str) -> Config | None:
        """The tile of the first product."""
        facts, height = self.facts, height_for(arch, self.facts, self.choices)
        return tile_for(arch, facts.up[0], min(self.choices, facts.count), height)

    def launch(self, arch: str) -> None:
        """Launch on tensors without values; every token has chosen one expert."""
        facts = self.facts
        x = torch.empty(self.choices, facts.up[0].columns, dtype=self.dtype)
        ids = torch.arange(self.choices)[:, None] % facts.count
        parts = EXPERTS_LAYOUTS[self.dtype].empty(self.spec, self.shape)
        biases = [torch.empty(facts.count, n, dtype=self.dtype) for n in (facts.width, x.shape[1])]
        up_bias, down_bias = biases if self.bias else (None, None)
        call = prepared(arch, facts, parts, ids, asm=True)
        hidden = up_product(call, x, facts, up_bias, 1, self.activation)
        down_product(call, hidden, facts.down, down_bias, ids.to(self.dtype))


Launch = Case | RowsCase | ExpertsCase


def _empty(spec: LinearSpec, shape: Shape, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return LAYOUTS[dtype].empty(replace(spec, scale=dtype), shape)


def shipped(dtypes: Sequence[torch.dtype] = DTYPES) -> Iterator[Launch]:
    """Every case."""
    for dtype in dtypes:
        for name, spec in SPECS.items():
            for rows in ROWS:
                yield Case(name, spec, _SQUARE, rows, dtype)
            for gather in (False, True):
                yield RowsCase(name, spec, _SQUARE, gather, dtype)
        for name in ("w4 g128", "w4 g32 offset q4_k"):
            for rows in ROWS:
                yield Case(name, SPECS[name], _RAGGED, rows, dtype)
            for choices in CHOICES:
                yield _experts_case(name, choices, dtype)
        # Where addresses of rows that lie anywhere leave the fewest registers.
        for name in CROWDED:
            yield _experts_case(name, 32 * _COUNT, dtype)


def _experts_case(name: str, choices: int, dtype: torch.dtype) -> ExpertsCase:
    """Experts of the size that Qwen3-30B-A3B has."""
    spec, layout, hidden, inner = replace(SPECS[name], scale=dtype), layout_name(dtype), 2048, 768
    roles = (
        RoleSpec("gate", spec, layout, inner, hidden),
        RoleSpec("up", spec, layout, inner, hidden),
        RoleSpec("down", spec, layout, hidden, inner),
    )
    return ExpertsCase(name, ExpertsSpec(roles), (_COUNT, 3 * inner, hidden), choices, dtype)
