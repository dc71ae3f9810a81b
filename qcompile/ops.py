"""The canonical ops: what every kernel must compute.

Comes in: activations, a weight's parts and its meaning as a string. Goes out: the float result.
Always holds: the implementation here *is* the meaning: decode to float32, apply the float op with
float32 accumulation, round once to the activation's dtype. Rows are decoded in runs, so that the
reference of a large weight needs little memory.

``meaning`` carries spec, layout and shape, because an op takes only tensors, numbers and strings.
"""

from __future__ import annotations

import ast
import functools
import math
from typing import Any

import torch
from torch.nn import functional

from qcompile.layout import QuantizedTensor, Shape, layout_of
from qcompile.spec import (
    AffineSpec,
    BlockSpec,
    ExpertsSpec,
    FloatSpec,
    LookupSpec,
    MatrixSpec,
    RoleSpec,
    ScaledSpec,
    Spec,
)

# Decoded weights of one run: 4 MB of floats stay in the caches on their way to the product, and in
# memory that was used before: large matrices take a tenth to a third of the time.
_AT_ONCE = 1 << 20
_SPECS: dict[str, type[MatrixSpec]] = {
    cls.__name__: cls for cls in (AffineSpec, LookupSpec, BlockSpec, ScaledSpec, FloatSpec)
}


def encode_meaning(weight: QuantizedTensor) -> str:
    """Spec, layout and shape of a weight as text that ``decode_meaning`` reads.

    >>> w = QuantizedTensor(FloatSpec(torch.float16), "float", (2, 3), {})
    >>> encode_meaning(w)
    "('FloatSpec', {'dtype': 'float16'}, 'float', (2, 3))"
    """
    return repr((*_plain_spec(weight.spec), weight.layout, tuple(weight.shape)))


def _plain_spec(spec: Spec) -> tuple[str, object]:
    """A spec as literals."""
    if isinstance(spec, ExpertsSpec):
        roles = [(r.role, _plain_spec(r.spec), r.layout, r.rows, r.columns) for r in spec.roles]
        return "ExpertsSpec", roles
    fields = {
        name: str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
        for name, value in vars(spec).items()
        if name != "exact"
    }
    return type(spec).__name__, fields


def _spec_of(name: str, content: Any) -> Spec:
    """The inverse of ``_plain_spec``."""
    if name == "ExpertsSpec":
        return ExpertsSpec(tuple(RoleSpec(r, _spec_of(*s), *rest) for r, s, *rest in content))  # type: ignore[arg-type]
    for key in ("dtype", "scale"):
        if key in content:
            content[key] = getattr(torch, content[key])
    return _SPECS[name](**content)


@functools.lru_cache(maxsize=4096)
def decode_meaning(meaning: str) -> tuple[Spec, str, Shape]:
    """The inverse of ``encode_meaning``: spec, layout name, shape."""
    name, content, layout, shape = ast.literal_eval(meaning)
    return _spec_of(name, content), layout, shape


def weight_of(parts: list[torch.Tensor], meaning: str) -> QuantizedTensor:
    """The record behind an op's arguments. Parts come in the order of the layout's fields."""
    spec, layout, shape = decode_meaning(meaning)
    names = [part.name for part in layout_of(layout).fields(spec, shape)]
    return QuantizedTensor(spec, layout, shape, dict(zip(names, parts, strict=True)))


# **** definitions ****

_library = torch.library.Library("qcompile", "DEF")
_library.define(
    "linear(Tensor x, Tensor[] parts, str meaning, Tensor? bias=None) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "embedding(Tensor ids, Tensor[] parts, str meaning, ScalarType dtype) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _linear(
    x: torch.Tensor, parts: list[torch.Tensor], meaning: str, bias: torch.Tensor | None = None
) -> torch.Tensor:
    weight = weight_of(parts, meaning)
    rows = weight.shape[0]
    wide = x.to(torch.float32)
    out = x.new_empty((*x.shape[:-1], rows))
    step = _rows_at_once(weight)
    for start in range(0, rows, step):
        run = slice(start, min(start + step, rows))
        part_of_bias = None if bias is None else bias[run].to(torch.float32)
        out[..., run] = functional.linear(wide, weight.take_rows(run).dequantize(), part_of_bias)
    return out


def _rows_at_once(weight: QuantizedTensor) -> int:
    """Rows of a run: whole entries of every part."""
    fields = layout_of(weight.layout).fields(weight.spec, weight.shape)
    whole = math.lcm(*(part.rows for part in fields if part.rows))
    return max(1, _AT_ONCE // max(1, weight.shape[1]) // whole) * whole


def _linear_shape(
    x: torch.Tensor, parts: list[torch.Tensor], meaning: str, bias: torch.Tensor | None = None
) -> torch.Tensor:
    _, _, (rows, columns) = decode_meaning(meaning)
    torch._check(
        x.shape[-1] == columns, lambda: f"linear: x has {x.shape[-1]} columns, w {columns}"
    )
    return x.new_empty((*x.shape[:-1], rows))


def _embedding(
    ids: torch.Tensor, parts: list[torch.Tensor], meaning: str, dtype: torch.dtype
) -> torch.Tensor:
    weight = weight_of(parts, meaning)
    flat = ids.reshape(-1).to(torch.int64)
    if flat.numel() and not (int(flat.min()) >= 0 and int(flat.max()) < weight.shape[0]):
        raise IndexError(f"embedding: an id is outside 0..{weight.shape[0] - 1}")
    return weight.take_rows(flat).dequantize().to(dtype).reshape(*ids.shape, weight.shape[1])


def _embedding_shape(
    ids: torch.Tensor, parts: list[torch.Tensor], meaning: str, dtype: torch.dtype
) -> torch.Tensor:
    _, _, (_, columns) = decode_meaning(meaning)
    return ids.new_empty((*ids.shape, columns), dtype=dtype)


_library.impl("linear", _linear, "CompositeExplicitAutograd")
_library.impl("embedding", _embedding, "CompositeExplicitAutograd")
torch.library.register_fake("qcompile::linear", _linear_shape, lib=_library)
torch.library.register_fake("qcompile::embedding", _embedding_shape, lib=_library)

linear = torch.ops.qcompile.linear.default
embedding = torch.ops.qcompile.embedding.default
