"""Weights to measure with: a format's name, and random bytes in it.

Comes in: a name such as ``q4_k``, ``4-bit g128`` or ``gptq 4-bit``, and a shape. Goes out: a
weight in the layout that a checkpoint would have it in.
Always holds: the same name, shape and seed give the same bytes; values are finite and small, so
that products can be compared; peers know formats by the same names (``qcompile.bench.workers``).
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import cast

import torch

from qcompile.errors import OptionError, nearest
from qcompile.layout import QuantizedTensor, Shape, layout_of
from qcompile.schemes import scheme_of
from qcompile.spec import AffineForm, AffineSpec, GroupOrder, LookupSpec, ScaledSpec, Spec

_F16, _F32 = torch.float16, torch.float32
# Tables as whole numbers: bitsandbytes' NF4 times 127, rounded, since only its speed matters here.
NF4 = (-127, -88, -67, -50, -36, -23, -12, 0, 10, 20, 31, 43, 56, 72, 92, 127)
WIDEST = 1 << 30  # a group as wide as the row is
_FRAME: dict[str, Spec] = {
    "4-bit g32": AffineSpec(4, 32, "symmetric", _F16),
    "4-bit g128": AffineSpec(4, 128, "symmetric", _F16),
    "4-bit g128 zero": AffineSpec(4, 128, "zero", _F16),
    "2-bit g64": AffineSpec(2, 64, "symmetric", _F16),
    "3-bit g128": AffineSpec(3, 128, "symmetric", _F16),
    "8-bit g128": AffineSpec(8, 128, "symmetric", _F16),
    "8-bit row": AffineSpec(8, WIDEST, "symmetric", _F16),
    "fp8 row": ScaledSpec(torch.float8_e4m3fn, WIDEST, _F32),
    "nf4 g64": LookupSpec(4, 64, NF4, _F16),
}
# Where a block has its float16 factors, in bytes from its start; the others need no care.
_FACTORS = {
    "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q8_0": (0,),
    "q1_0": (0,), "q2_0": (0,),
    "q2_k": (80, 82), "q3_k": (108,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,),
    "tq1_0": (52,), "tq2_0": (64,), "iq1_s": (0,), "iq2_xxs": (0,), "iq2_xs": (0,), "iq2_s": (0,),
    "iq3_xxs": (0,), "iq3_s": (0,), "iq4_nl": (0,), "iq4_xs": (0,),
}  # fmt: skip
# Bytes that hold an exponent, and a value that it may have.
_EXPONENTS = {
    "mxfp4": (slice(0, 1), 118),
    "nvfp4": (slice(0, 4), 40),
    "iq1_m": (slice(55, 56), 0),
}
_Words = tuple[str, str, int, GroupOrder]
_WORDS: dict[str, _Words] = {
    "gptq 4-bit": ("gptq", "gptq", 4, "sequential"),
    "gptq act-order": ("gptq", "gptq", 4, "permuted"),
    "gptq 8-bit": ("gptq", "gptq", 8, "sequential"),
    "gptq 3-bit": ("gptq", "gptq", 3, "sequential"),
    "awq": ("awq", "awq", 4, "sequential"),
    "ct.packed": ("compressed_tensors", "ct.packed", 4, "sequential"),
}
WORDS = tuple(_WORDS)
_SPEC = re.compile(r"uint([1-8]) g([0-9]+) (symmetric|zero|offset)")


def names() -> tuple[str, ...]:
    """Every format."""
    return (*_FRAME, *gguf_names(), *WORDS)


def gguf_names() -> tuple[str, ...]:
    """GGUF's types."""
    scheme_of("gguf")  # registers layouts and edges
    from qcompile.schemes.gguf.blocks import BLOCKS

    return tuple(BLOCKS)


def stored(name: str, shape: Shape, seed: int = 0) -> QuantizedTensor:
    """A weight ``[N, K]`` of a format.

    Raises:
        OptionError: the format is not known, or its blocks do not fill the rows.
    """
    if name in _FRAME:
        return random_weight(_of_row(_FRAME[name], shape[-1]), *shape)
    if name in _WORDS:
        return _words(name, shape, seed)
    if name in gguf_names():
        return _blocks(name, shape, seed)
    if found := _SPEC.fullmatch(name):
        bits, group, form = int(found[1]), int(found[2]), found[3]
        return random_weight(AffineSpec(bits, group, cast("AffineForm", form), _F16), *shape)
    raise _unknown(name)


def check_name(name: str) -> None:
    """Raise OptionError unless the format is known; nothing is made."""
    if name not in names() and not _SPEC.fullmatch(name):
        raise _unknown(name)


def _unknown(name: str) -> OptionError:
    return OptionError(
        f"format {name!r}",
        "unknown",
        f"one of {', '.join(names())}, or a spec such as 'uint4 g64 zero'",
        f"name a known format{nearest(name, names())}",
    )


def random_weight(spec: Spec, n: int, k: int) -> QuantizedTensor:
    """Random codes and scales of a spec in the frame's own layout, values around 0.1."""
    if isinstance(spec, ScaledSpec):
        data = torch.empty(n, k).normal_(generator=_draw(n + k)).to(spec.dtype)
        scale = torch.full((n, -(-k // spec.group)), 0.02, dtype=spec.scale)
        return QuantizedTensor(spec, "scaled", (n, k), {"data": data, "scale": scale})
    assert isinstance(spec, (AffineSpec, LookupSpec))
    name = "affine" if isinstance(spec, AffineSpec) else "lookup"
    draw, parts = _draw(n + k + spec.bits), {}
    for field in layout_of(name).fields(spec, (n, k)):
        if field.name == "codes":
            parts["codes"] = torch.randint(
                0, 1 << spec.bits, field.shape, generator=draw, dtype=torch.uint8
            )
        elif field.name == "zero":
            parts["zero"] = torch.full(field.shape, 1 << (spec.bits - 1), dtype=torch.int32)
        else:
            values = torch.rand(field.shape, generator=draw) * 0.2 / (1 << spec.bits)
            # The minimum of a group is negative: values stay around zero.
            parts[field.name] = (values if field.name == "scale" else -values * 8).to(field.dtype)
    return QuantizedTensor(spec, name, (n, k), parts)


def _of_row(spec: Spec, k: int) -> Spec:
    if isinstance(spec, (AffineSpec, ScaledSpec)) and spec.group == WIDEST:
        return replace(spec, group=k)
    return spec


def _draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _blocks(name: str, shape: Shape, seed: int) -> QuantizedTensor:
    from qcompile.schemes.gguf.blocks import BLOCKS

    spec = BLOCKS[name].spec
    weight = _bytes(spec, f"gguf.{name}", shape, seed)
    blocks = weight.parts["data"].view(-1, spec.bytes)
    draw = _draw(seed)
    for at in _FACTORS.get(name, ()):
        factors = (torch.rand(len(blocks), 1, generator=draw) + 0.5) * 1e-4
        blocks[:, at : at + 2] = factors.to(_F16).view(torch.uint8)
    if name in _EXPONENTS:
        place, exponent = _EXPONENTS[name]
        blocks[:, place] = exponent
    return weight


def _words(name: str, shape: Shape, seed: int) -> QuantizedTensor:
    scheme, layout, bits, order = _WORDS[name]
    scheme_of(scheme)  # registers the layout
    form: AffineForm = "zero"
    spec = AffineSpec(bits, 128, form, _F16, order)
    weight = _bytes(spec, layout, shape, seed)
    for key, part in weight.parts.items():
        if part.dtype == _F16:
            part.copy_((torch.rand(part.shape, generator=_draw(seed)) + 0.5) * 1e-2)
        elif key == "g_idx" and order == "permuted":
            index = torch.arange(shape[-1], dtype=part.dtype) // spec.group
            part.copy_(index[torch.randperm(shape[-1], generator=_draw(seed))])
        elif key == "g_idx":
            part.copy_(torch.arange(shape[-1], dtype=part.dtype) // spec.group)
    return weight


def _bytes(spec: Spec, layout: str, shape: Shape, seed: int) -> QuantizedTensor:
    draw, parts = _draw(seed), {}
    for field in layout_of(layout).fields(spec, shape):
        data = torch.randint(0, 256, (field.nbytes,), generator=draw, dtype=torch.uint8)
        parts[field.name] = data.view(field.dtype).view(field.shape)
    return QuantizedTensor(spec, layout, tuple(shape), parts)
