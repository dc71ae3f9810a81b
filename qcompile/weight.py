"""A weight that is still in its checkpoint.

Comes in: headers. Goes out: a reference that reads rows when asked.
Always holds: making, listing and planning with references reads no weight bytes; reading some rows
touches only the bytes of those rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from qcompile.layout import QuantizedTensor, Shape, layout_of
from qcompile.spec import ActivationSpec, Spec, is_quantized

Rows = slice | torch.Tensor


@dataclass(frozen=True)
class WeightRef:
    """One named weight of a checkpoint or a model.

    Attributes:
        name: the name it is known by here: the file's own, or the model's parameter.
        spec: what its values mean.
        layout: name of the layout its bytes have.
        shape: ``(N, K)`` (or ``(N,)`` for vectors, ``(E, N, K)`` for experts).
        read: the rows of the weight as a QuantizedTensor in ``layout``. The parts may be views of a
            file mapping: valid while the checkpoint is open, never to be written.
        source: where it comes from, for messages: ``model.gguf: blk.0.attn_q.weight``.
        release: drops the pages that ``read`` brought into memory, where that is possible.
        facts: what the scheme's configuration says of this weight, one line for the plan.
        activations: how the checkpoint expects the weight's input to be quantized, if it does.
    """

    name: str
    spec: Spec
    layout: str
    shape: Shape
    read: Callable[[Rows], QuantizedTensor]
    source: str
    release: Callable[[], None] = lambda: None
    facts: str = ""
    activations: ActivationSpec | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the stored weight."""
        return layout_of(self.layout).nbytes(self.spec, self.shape)

    def load(self) -> QuantizedTensor:
        """The whole weight in its stored layout."""
        return self.read(slice(0, self.shape[0] if self.shape else 1))

    def dequantize(self) -> torch.Tensor:
        """The whole weight as float32, shape ``self.shape``."""
        return self.load().dequantize()

    def renamed(self, name: str) -> WeightRef:
        """The same weight under another name."""
        return replace(self, name=name)

    def with_rows(self, order: torch.Tensor) -> WeightRef:
        """The same weight with row ``i`` taken from stored row ``order[i]`` (int64 ``[N]``).

        No value changes and nothing is decoded: rows are moved as bytes.
        """

        def read(rows: Rows) -> QuantizedTensor:
            return self.read(order[rows])

        return replace(self, read=read)


def same_floats(one: WeightRef, other: WeightRef) -> bool:
    """Whether two weights are stored as floats, and as the same ones.

    Both are read when their headers agree.
    """
    if is_quantized(one.spec) or one.spec != other.spec or one.shape != other.shape:
        return False
    same = torch.equal(one.load().parts["data"], other.load().parts["data"])
    one.release()
    other.release()
    return same
