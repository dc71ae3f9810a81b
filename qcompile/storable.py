"""The weights that schemes can store, for the tables of ``docs/schemes.md``.

Comes in: a scheme's name. Goes out: specs and layouts, with the names that the tables use.
Always holds: layouts, types and widths are those that the scheme itself lists, where it lists them;
every layout that a scheme registers appears (a test holds that).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from qcompile.spec import (
    ActivationSpec,
    AffineForm,
    AffineSpec,
    GroupOrder,
    LookupSpec,
    ScaledSpec,
    Spec,
)

N, K = 1024, 4096


@dataclass(frozen=True)
class Stored:
    """A weight that a scheme can store.

    Attributes:
        label: what the table calls it; a width stands first.
        spec: its meaning.
        layout: how its bytes lie.
        activations: how its checkpoint expects the input to be quantized, if it does.
    """

    label: str
    spec: Spec
    layout: str
    activations: ActivationSpec | None = None


def _integer(bits: int, layout: str, form: AffineForm = "symmetric", group: int = 128) -> Stored:
    name = f"{bits} bits {'' if form == 'symmetric' else 'a'}symmetric"
    name += "" if group == 128 else ", a scale a row" if group == K else f", groups of {group}"
    return Stored(name, AffineSpec(bits, group, form, torch.float16), layout)


def _ordered(layout: str, order: GroupOrder) -> Stored:
    name = "act-order" if order == "permuted" else "act-order with uneven groups"
    return Stored(f"4 bits, {name}", AffineSpec(4, 128, "zero", torch.float16, order=order), layout)


def _widths(layout: str, widths: Iterable[int], form: AffineForm) -> list[Stored]:
    return [_integer(bits, layout, form) for bits in widths]


def _gguf() -> list[Stored]:
    from qcompile.schemes.gguf.blocks import BLOCKS, layout_name

    return [Stored(f"`{n}`", block.spec, layout_name(block.spec)) for n, block in BLOCKS.items()]


def _gptq() -> list[Stored]:
    from qcompile.schemes.gptq.layout import NAME
    from qcompile.schemes.gptq.rules import BITS

    return [
        *_widths(NAME, BITS, "symmetric"),
        *_widths(NAME, BITS, "zero"),
        *(_integer(4, NAME, "zero", group) for group in (16, 32, K)),
        *(_ordered(NAME, order) for order in ("permuted", "indexed")),
    ]


def _awq() -> list[Stored]:
    from qcompile.schemes.awq.layout import GEMM, GEMV

    kinds: tuple[tuple[AffineForm, int], ...] = (("symmetric", 128), ("zero", 128), ("zero", 32))
    rows = [_integer(4, layout, form, group) for layout in (GEMM, GEMV) for form, group in kinds]
    version = {GEMM: "gemm", GEMV: "gemv"}
    return [Stored(f"{r.label}, {version[r.layout]}", r.spec, r.layout) for r in rows]


def _auto_round() -> list[Stored]:
    from qcompile.schemes.gptq.layout import NAME
    from qcompile.schemes.gptq.rules import BITS

    forms: tuple[AffineForm, ...] = ("symmetric", "zero")
    parts = {
        "as GPTQ": [row for form in forms for row in _widths(NAME, BITS, form)],
        "as AWQ": [row for row in _awq() if row.label.endswith("gemm")],
        "as llm-compressor": _ct_packed(range(2, 9)),
    }
    return [
        Stored(f"{row.label}, {how}", row.spec, row.layout)
        for how, rows in parts.items()
        for row in rows
    ]


def _ct_packed(widths: Iterable[int]) -> list[Stored]:
    widths = list(widths)
    return [*_widths("ct.packed", widths, "symmetric"), *_widths("ct.packed", widths, "zero")]


def _compressed_tensors() -> list[Stored]:
    from qcompile.schemes.compressed_tensors.layout import E2M1_DOUBLED

    padded = _widths("ct.padded", (3, 5, 6, 7), "symmetric")
    int8, fp8 = (ActivationSpec(d, "token") for d in (torch.int8, torch.float8_e4m3fn))
    row = AffineSpec(8, K, "symmetric", torch.bfloat16)
    e4m3, e5m2, half = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
    return [
        *_ct_packed(range(1, 9)),
        *(Stored(f"{w.label}, old packing", w.spec, w.layout) for w in padded),
        *(_ordered("ct.packed", order) for order in ("permuted", "indexed")),
        Stored("int8, a scale a row (W8A8)", row, "ct.int8", int8),
        Stored("int8, groups of 128", AffineSpec(8, 128, "symmetric", half), "ct.int8"),
        Stored("FP8 e4m3, a scale a row", ScaledSpec(e4m3, K, half), "scaled", fp8),
        Stored("FP8 e4m3, blocks of 128", ScaledSpec(e4m3, 128, half), "scaled", fp8),
        Stored("FP8 e5m2, a scale a row", ScaledSpec(e5m2, K, half), "scaled"),
        Stored("MXFP8", ScaledSpec(e4m3, 32, torch.float32), "scaled"),
        Stored("MXFP4", LookupSpec(4, 32, E2M1_DOUBLED), "ct.mxfp4"),
        Stored("NVFP4", LookupSpec(4, 16, E2M1_DOUBLED), "ct.nvfp4"),
    ]


STORED: dict[str, Callable[[], list[Stored]]] = {
    "gguf": _gguf,
    "gptq": _gptq,
    "awq": _awq,
    "auto_round": _auto_round,
    "compressed_tensors": _compressed_tensors,
}
