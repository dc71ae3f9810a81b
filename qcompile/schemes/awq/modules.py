"""The quantized weights of an AWQ folder.

Comes in: stored tensors and the rule of each module. Goes out: weights ``[N, K]`` in the layouts
``awq`` and ``awq.gemv``.
Always holds: the shapes of the tensors agree with the version that the settings name, so that one
is never read as the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from qcompile.errors import SchemeError
from qcompile.layout import QuantizedTensor, Shape
from qcompile.schemes.awq.layout import GEMM, GEMV, PER_WORD, unpack_rows
from qcompile.schemes.folder.checkpoint import (
    SCALES,
    need_tensor,
    quantized_modules,
    ruled_modules,
)
from qcompile.schemes.folder.stored import StoredTensor
from qcompile.schemes.words import unpack_words
from qcompile.spec import AffineForm, AffineSpec
from qcompile.weight import Rows, WeightRef

_MIDDLE = 8
_MARKS = ("qweight", "qzeros")
_TENSORS = ("qweight", "qzeros", "scales")


@dataclass(frozen=True)
class Rule:
    """How one module is stored.

    Attributes:
        group: input columns that share a scale; -1 for all of them.
        sym: whether every zero point is 8.
        version: which way the words run.
        origin: where the rule stands, for the plan.
    """

    group: int
    sym: bool
    version: Literal["gemm", "gemv"]
    origin: str

    def __str__(self) -> str:
        group = "channel" if self.group == -1 else f"g{self.group}"
        kind = "sym" if self.sym else "asym"
        return f"4-bit {group} {kind} {self.version}, {self.origin}"


def read_modules(
    stored: Mapping[str, StoredTensor], rule_of: Callable[[str], Rule | None]
) -> tuple[dict[str, WeightRef], set[str]]:
    """Every quantized weight by name, and the names of the tensors they are made of.

    Raises:
        SchemeError: tensors that are missing, or contradict the rule or each other.
    """
    weights: dict[str, WeightRef] = {}
    used: set[str] = set()
    marked = quantized_modules(stored, lambda last, _: last in _MARKS, ("qzeros",))
    for module, tensors, rule in ruled_modules(marked, rule_of):
        weights[f"{module}.weight"] = _weight(module, tensors, rule)
        used.update(f"{module}.{name}" for name in _TENSORS)
    return weights, used


def _weight(module: str, tensors: Mapping[str, StoredTensor], rule: Rule) -> WeightRef:
    qweight = need_tensor(tensors, "qweight", module, (torch.int32,))
    need_tensor(tensors, "scales", module, SCALES)
    if not rule.sym or "qzeros" in tensors:
        need_tensor(tensors, "qzeros", module, (torch.int32,))
    shape = _shape(tensors, rule)
    group = shape[1] if rule.group == -1 else min(rule.group, shape[1])
    form: AffineForm = "symmetric" if rule.sym else "zero"
    spec = AffineSpec(4, group, form, tensors["scales"].dtype)
    parts = _Parts(tensors, rule, spec, shape)
    return WeightRef(
        f"{module}.weight",
        spec,
        GEMM if rule.version == "gemm" else GEMV,
        shape,
        parts.read,
        f"{qweight.file}: {module}.weight",
        qweight.release,
        str(rule),
    )


@dataclass(frozen=True)
class _Parts:
    """Reads rows of one weight."""

    tensors: Mapping[str, StoredTensor]
    rule: Rule
    spec: AffineSpec
    shape: tuple[int, int]

    def read(self, rows: Rows) -> QuantizedTensor:
        n, k = self.shape
        if not isinstance(rows, slice):
            return self.read(slice(0, n)).take_rows(rows)
        start, stop, _ = rows.indices(n)
        if self.rule.version == "gemm":
            return self._gemm(start, stop)
        groups = -(-k // self.spec.group)
        parts = {
            "qweight": self.tensors["qweight"].part(0, start, stop),
            "scales": self.tensors["scales"].part(0, start, stop)[:, :groups].contiguous(),
        }
        if "qzeros" in self.tensors:
            words = self.tensors["qzeros"].part(0, start, stop)
            self._add_zeros(unpack_words(words, 4, 1, groups), parts)
        return QuantizedTensor(self.spec, GEMV, (stop - start, k), parts)

    def _gemm(self, start: int, stop: int) -> QuantizedTensor:
        n, k = self.shape
        # Rows that share a word come together; the layout says so by ``rows``.
        if start % PER_WORD or (stop % PER_WORD and stop != n):
            return self.read(slice(0, n)).take_rows(slice(start, stop))
        first, last = start // PER_WORD, stop // PER_WORD
        parts = {
            "qweight": self.tensors["qweight"].part(1, first, last),
            "scales": self.tensors["scales"].part(1, start, stop),
        }
        if "qzeros" in self.tensors:
            self._add_zeros(unpack_rows(self.tensors["qzeros"].part(1, first, last)), parts)
        return QuantizedTensor(self.spec, GEMM, (stop - start, k), parts)

    def _add_zeros(self, zeros: torch.Tensor, parts: dict[str, torch.Tensor]) -> None:
        """Keep the zero points, or check that they are what the settings promise."""
        if not self.rule.sym:
            parts["zeros"] = zeros
        elif not bool((zeros == _MIDDLE).all()):
            raise SchemeError(
                self.tensors["qzeros"].source,
                f"a zero point of {int(zeros[zeros != _MIDDLE][0])} ({self.rule})",
                f"zero points of {_MIDDLE}, since the settings say there are none",
                "set zero_point to true if the tensors are right",
            )


def zeros_width(k: int, group: int) -> int:
    """Words of zero points in a row of a gemv file.

    AutoAWQ pads the row to a multiple of 1, 2 or 4 words for groups of 128, 64 or 32.
    """
    words = -(-(k // group) // PER_WORD)
    multiple = {128: 1, 64: 2, 32: 4}.get(group, 1) if group < 128 else 1
    return -(-words // multiple) * multiple


def _shape(tensors: Mapping[str, StoredTensor], rule: Rule) -> tuple[int, int]:
    """``(N, K)``, after checking every tensor against it."""
    qweight = tensors["qweight"]
    if rule.version == "gemm":
        k, n = qweight.shape[0], qweight.shape[1] * PER_WORD
        group = k if rule.group == -1 else rule.group
        groups = -(-k // group)
        wanted: dict[str, Shape] = {"scales": (groups, n), "qzeros": (groups, n // PER_WORD)}
    else:
        n, k = qweight.shape[0], qweight.shape[1] * PER_WORD
        width = zeros_width(k, k if rule.group == -1 else rule.group)
        wanted = {"scales": (n, width * PER_WORD), "qzeros": (n, width)}
    for name, needed in wanted.items():
        if name in tensors and tensors[name].shape != needed:
            raise SchemeError(
                tensors[name].source,
                f"shape {tensors[name].shape}",
                f"shape {needed} for a weight ({n}, {k}), {rule}",
                "check group_size and version against the tensors",
            )
    return n, k
