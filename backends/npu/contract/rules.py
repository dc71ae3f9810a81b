"""What the rules of several Ascend operators share.

Comes in: tensors of a call, perhaps on the meta device. Goes out: how they lie.
Always holds: the questions are those of the host code; the rules themselves, see
``qcompile.backends.rules``, stand with their operator.

Sources are abbreviated: ``op-plugin`` is the operator's page in ``docs/context`` of
Ascend/op-plugin (read at commit 1dd24f2), ``aclnn`` the host code of CANN's open operators
(hicann/ops-nn at e5c3fa9), ``torch_npu`` the package's own Python and C++ code, release 2.13.0.
"""

from __future__ import annotations

import torch

from qcompile.backends.rules import Rule, broken, name_of, unless

LARGEST = 65535  # of K and of N, in every matrix operator


def is_turned(tensor: torch.Tensor) -> bool:
    """Whether the host code takes a matrix for the transpose of a contiguous one.

    It looks at sizes and strides of the last two dimensions alone, so that a matrix with a single
    row or column may be both.
    """
    if tensor.dim() < 2 or tensor.shape[-1] == tensor.shape[-2] == 1:
        return False
    return tensor.stride(-2) == 1 and tensor.stride(-1) == tensor.shape[-2]


def lies_well(tensor: torch.Tensor) -> bool:
    """Whether a matrix is contiguous or the transpose of a contiguous one."""
    return tensor.is_contiguous() or is_turned(tensor)


__all__ = ["LARGEST", "Rule", "broken", "is_turned", "lies_well", "name_of", "unless"]
