"""Edges to the planar layout.

Comes in: a weight, or a run of its rows, in ``affine``, ``lookup`` or ``scaled``. Goes out: the
same in ``cuda.p16.DTYPE``. Always holds: codes and zeros are kept as they are; what is rounded is
scales and float offsets, and only where DTYPE cannot hold them.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from qcompile.backends.cuda import planes
from qcompile.backends.cuda.coding import coding_of
from qcompile.backends.cuda.layouts import DTYPES, coded, is_permuted, layout_name
from qcompile.edge import Edge, register_edge
from qcompile.errors import LayoutError
from qcompile.layout import QuantizedTensor
from qcompile.spec import AffineSpec, LookupSpec, ScaledSpec, Spec

_PART = {"affine": "codes", "lookup": "codes", "scaled": "data"}


def target_spec(spec: Spec, dtype: torch.dtype) -> Spec | None:
    """The spec after an edge to the layout of a dtype, None where no K would make it fit."""
    if not isinstance(spec, (AffineSpec, LookupSpec, ScaledSpec)):
        return None
    # A row of one group fits at any size of it: what K decides is the kernels' to refuse.
    if isinstance(coding_of(spec, spec.group), str):
        return None
    return replace(spec, scale=dtype)


def is_exact(spec: Spec, dtype: torch.dtype) -> bool:
    """Whether scales keep their dtype and there is no float offset."""
    if isinstance(spec, AffineSpec) and spec.form == "offset":
        return False
    return isinstance(spec, (AffineSpec, LookupSpec, ScaledSpec)) and spec.scale == dtype


def loss(dtype: torch.dtype) -> str:
    """What the edges lose where they are not exact."""
    unit = {torch.float16: "2**-11", torch.bfloat16: "2**-8"}[dtype]
    tail = ", or by 2**-25 where it is below 2**-14" if dtype == torch.float16 else ""
    return (
        f"scales and float offsets are rounded to {str(dtype).removeprefix('torch.')}: "
        f"each moves by at most {unit} of itself{tail}"
    )


def apply(weight: QuantizedTensor, dtype: torch.dtype) -> QuantizedTensor:
    """A weight in ``affine``, ``lookup`` or ``scaled`` in the planar layout."""
    spec, coding = weight.spec, coded(weight.spec, weight.shape)
    target = target_spec(spec, dtype)
    assert target is not None
    codes = weight.parts[_PART[weight.layout]]
    if coding.kind == "float8":
        codes = _numbers(codes)
    columns = None
    if is_permuted(spec):
        columns = torch.argsort(weight.parts["g_idx"], stable=True)
        codes = codes.index_select(1, columns)
    words, high = planes.pack(codes, coding)
    parts = {"codes": words} if high is None else {"codes": words, "high": high}
    parts["scale"] = _by_group(narrow(weight.parts["scale"], dtype, "scales"))
    if coding.form == "zero":
        assert isinstance(spec, AffineSpec)
        parts["zero"] = _by_group(_zeros(weight.parts["zero"], spec.bits, dtype))
    if coding.form == "offset":
        parts["offset"] = _by_group(narrow(weight.parts["offset"], dtype, "offsets"))
    if columns is not None:
        parts["columns"] = columns.to(torch.int32)
    return QuantizedTensor(target, layout_name(dtype), weight.shape, parts)


def _by_group(vectors: torch.Tensor) -> torch.Tensor:
    return vectors.t().contiguous()


def narrow(values: torch.Tensor, dtype: torch.dtype, what: str) -> torch.Tensor:
    """Values in the dtype of the activations; one that overflows is an error."""
    rounded = values.to(dtype)
    if not bool((rounded.isfinite() | ~values.isfinite()).all()):
        raise LayoutError(
            f"edge to {layout_name(dtype)}",
            f"{float(values[values.isfinite()].abs().max()):.3g} among the {what}",
            f"numbers that {dtype} can hold",
            "run the model in bfloat16",
        )
    return rounded


def _zeros(zero: torch.Tensor, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """Zero points as the kernels subtract them: exactly, together with their magic number."""
    limit = 1 << bits
    if zero.numel() and not (int(zero.min()) >= 0 and int(zero.max()) <= limit):
        raise LayoutError(
            f"edge to {layout_name(dtype)}",
            f"zero points from {int(zero.min())} to {int(zero.max())}",
            f"zero points from 0 to {limit} with codes of {bits} bits",
            'on_unsupported="dequantize"',
        )
    return zero.to(dtype)


def _numbers(data: torch.Tensor) -> torch.Tensor:
    """The bytes of floats of 8 bits. Kernels move their bits, so none may be no number."""
    codes = data.view(torch.uint8)
    if bool(((codes & 127) == 127).any()):
        raise LayoutError(
            "edge to cuda.p16",
            "a weight that is no number (NaN)",
            "numbers",
            "look at the checkpoint: its layer gives no numbers either",
        )
    return codes


def _edge(source: str, dtype: torch.dtype) -> Edge:
    return Edge(
        source,
        layout_name(dtype),
        lambda spec: target_spec(spec, dtype),
        lambda weight: apply(weight, dtype),
        error=loss(dtype),
        exact=lambda spec: is_exact(spec, dtype),
    )


EDGES = tuple(register_edge(_edge(source, dtype)) for source in _PART for dtype in DTYPES)
