"""Rules as data.

Comes in: a call of an operator. Goes out: what is wrong with it, or None.
Always holds: a rule says in one sentence what must hold, where that is written, and what was found
instead; rules are asked in order, and only the first broken one is told.

Sources are abbreviated: ``op-plugin`` is the operator's page in ``docs/context`` of
Ascend/op-plugin (read at commit 1dd24f2), ``aclnn`` the host code of CANN's open operators
(hicann/ops-nn at e5c3fa9), ``torch_npu`` the package's own Python and C++ code, release 2.13.0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

Call = TypeVar("Call")

LARGEST = 65535  # of K and of N, in every matrix operator


@dataclass(frozen=True)
class Rule(Generic[Call]):
    """One demand of an operator.

    Attributes:
        text: what must hold.
        source: where that is written.
        found: what a call has instead, or None where it keeps the rule. The rules before this one
            hold already.
    """

    text: str
    source: str
    found: Callable[[Call], str | None]


def broken(rules: Sequence[Rule[Call]], call: Call) -> str | None:
    """The first rule that a call breaks, as one line, or None."""
    for rule in rules:
        found = rule.found(call)
        if found is not None:
            return f"{rule.text}; {found} ({rule.source})"
    return None


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


def unless(holds: bool, found: str) -> str | None:
    """``found`` where something does not hold."""
    return None if holds else found


def name_of(dtype: torch.dtype) -> str:
    """A dtype without its module."""
    return str(dtype).removeprefix("torch.")
