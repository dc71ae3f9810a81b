"""What stands in the place of a quantized parameter: a shape and a dtype without values.

Comes in: a shape, a dtype, a device. Goes out: a parameter that has no storage.
Always holds: computing with it raises OptionError, so that no result is made of values that are not
there; names, shapes, views and dtypes can be asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from qcompile.errors import OptionError


class StandIns(FakeTensorMode):
    """The mode of stand-ins: torch's, with an error that says what happened."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=False)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Refuse every use but views: results would be shapes that pretend to be values."""
        held = next((g for g in tree_leaves((args, kwargs)) if isinstance(g, FakeTensor)), None)
        if held is not None and not _only_looks(func):
            raise OptionError(
                f"{func} on a quantized parameter of shape {tuple(held.shape)}",
                "it is a stand-in: its values are packed for a kernel, and no floats are kept",
                "a use inside the compiled forward",
                "model.qcompile.catalogue[name].dequantize() reads values; adapters stay beside "
                "quantized weights, they cannot be merged into them",
            )
        return super().__torch_dispatch__(func, types, args, kwargs or {})


def _only_looks(func: Any) -> bool:
    return bool(getattr(func, "is_view", False)) or func is torch.ops.aten.detach.default


def stand_in(
    shape: Sequence[int], dtype: torch.dtype, mode: StandIns, device: torch.device | None = None
) -> nn.Parameter:
    """A parameter without storage, on the CPU where no device is named."""
    with mode:
        empty = torch.empty(tuple(shape), dtype=dtype, device=device or "cpu")
    return nn.Parameter(empty, requires_grad=False)
