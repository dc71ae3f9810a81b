"""The codebooks of the IQ types.

Comes in: the name of a type. Goes out: its codebook as numbers of magnitudes. Always holds: the
tables are read from the gguf package, which owns them, at the first use of a type and once.
"""

from __future__ import annotations

import functools
import importlib

import torch


@functools.cache
def grid_codes(name: str) -> torch.Tensor:
    """Codebook of ``IQ2_XXS`` and its like: uint8 ``[entries, columns]``.

    An entry counts in the ascending magnitudes of the type (for IQ1 in -1, 0, 1).

    >>> grid_codes("IQ3_S").shape, int(grid_codes("IQ3_S").max())
    (torch.Size([512, 4]), 7)
    """
    owner = getattr(importlib.import_module("gguf.quants"), name)
    owner.init_grid()
    values = torch.from_numpy(owner.grid.copy()).reshape(owner.grid_shape)
    levels = torch.tensor(owner.grid_map, dtype=torch.float32, device="cpu")
    return torch.searchsorted(levels, values.contiguous()).to(torch.uint8)
