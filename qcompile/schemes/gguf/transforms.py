"""What converters did to weights on their way into a file, undone.

Comes in: a reference to a stored tensor. Goes out: a reference to the weight the model expects.
Always holds: nothing is read until the result is read; quantized rows are moved as bytes, and
values change only where a weight is stored as floats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from qcompile.errors import SchemeError
from qcompile.layout import QuantizedTensor
from qcompile.spec import FloatSpec
from qcompile.weight import Rows, WeightRef


@dataclass(frozen=True)
class PermuteRows:
    """Rows of each head were interleaved, for a rotary embedding over neighbouring rows.

    Converters write, for a head of ``d`` rows, row ``j`` of the first half at ``2 * j`` and row
    ``j`` of the second half at ``2 * j + 1``. Source: ``permute`` in llama.cpp's converter.

    Attributes:
        stem: the tensor's name in a layer, weight and bias alike.
        heads: the configuration value that counts its heads.
    """

    stem: str
    heads: str

    def undo(self, weight: WeightRef, values: Mapping[str, object]) -> WeightRef:
        """The same rows in the model's order; bytes are moved, nothing is decoded."""
        heads = values[self.heads]
        assert isinstance(heads, int)
        rows = weight.shape[0]
        if rows % (2 * heads):
            raise SchemeError(
                weight.source,
                f"{rows} rows",
                f"an even number of rows for each of {heads} heads",
                "convert the file again; its shapes and its metadata disagree",
            )
        return weight.with_rows(row_order(rows, heads))


@dataclass(frozen=True)
class AddToFloat:
    """A constant was added to float tensors.

    Attributes:
        suffix: last part of the names of the tensors, for instance ``norm``.
        value: what has to be added, in float32, to have the model's values.
    """

    suffix: str
    value: float

    def undo(self, weight: WeightRef, values: Mapping[str, object]) -> WeightRef:
        """The values plus ``value`` as a float32 weight."""
        if not isinstance(weight.spec, FloatSpec):
            raise SchemeError(
                weight.source,
                f"stored as {weight.spec}",
                "a float tensor, because a constant has to be added to it",
                "convert the file again; converters keep norms in f32",
            )
        spec = FloatSpec(torch.float32)

        def read(rows: Rows) -> QuantizedTensor:
            data = weight.read(rows).dequantize() + self.value
            return QuantizedTensor(spec, "float", tuple(data.shape), {"data": data})

        return replace(weight, spec=spec, layout="float", read=read)


@dataclass(frozen=True)
class AsRow:
    """A matrix of one row was stored as a vector.

    Attributes:
        stem: the tensor's name in a layer.
    """

    stem: str

    def undo(self, weight: WeightRef, values: Mapping[str, object]) -> WeightRef:
        """The vector ``[K]`` as ``[1, K]``; a matrix as it is."""
        if len(weight.shape) != 1:
            return weight

        def read(rows: Rows) -> QuantizedTensor:
            data = weight.load().parts["data"][None][rows]
            return QuantizedTensor(weight.spec, "float", tuple(data.shape), {"data": data})

        return replace(weight, shape=(1, *weight.shape), read=read)


Transform = PermuteRows | AddToFloat | AsRow


def applies(transform: Transform, stem: str) -> bool:
    """Whether a transform was applied to the tensors of this name in a layer."""
    if isinstance(transform, AddToFloat):
        return stem.endswith(transform.suffix)
    return stem == transform.stem


@lru_cache(maxsize=8)
def row_order(rows: int, heads: int) -> torch.Tensor:
    """The stored row of each row of the model, int64 ``[rows]``.

    >>> row_order(16, 2).tolist()
    [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]
    """
    return torch.arange(rows).view(heads, rows // heads // 2, 2).transpose(1, 2).reshape(-1)
