"""The quantized weights of a GPTQ folder.

Comes in: stored tensors and the rule of each module. Goes out: weights ``[N, K]`` in the layout
``gptq``.
Always holds: the order of columns is decided by the group index itself, never by ``desc_act``; what
a rule says is checked against the shapes of the tensors; symmetric weights are checked to have
symmetric zero points when their rows are read.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from qcompile.errors import SchemeError
from qcompile.layout import QuantizedTensor
from qcompile.schemes.folder.checkpoint import (
    SCALES,
    need_tensor,
    quantized_modules,
    ruled_modules,
)
from qcompile.schemes.folder.stored import StoredTensor
from qcompile.schemes.gptq.layout import NAME
from qcompile.schemes.gptq.rules import Rule
from qcompile.schemes.gptq.zeros import looks_damaged, read_zeros
from qcompile.schemes.words import words_for
from qcompile.spec import AffineForm, AffineSpec, GroupOrder
from qcompile.weight import Rows, WeightRef

_MARKS = ("qweight", "qzeros")
_TENSORS = ("qweight", "qzeros", "scales", "g_idx")
_ALIGN = 32  # rows after which zero points of any width start a word


def read_modules(
    stored: Mapping[str, StoredTensor], rule_of: Callable[[str], Rule | None]
) -> tuple[dict[str, WeightRef], set[str]]:
    """Every quantized weight by name, and the names of the tensors they are made of.

    Args:
        stored: the folder's tensors.
        rule_of: the rule of a module, None when it should not be quantized.

    Raises:
        SchemeError: tensors that are missing, or contradict the rule or each other.
    """
    weights: dict[str, WeightRef] = {}
    used: set[str] = set()
    indexed = next((name for name in stored if name.endswith(".g_idx")), None)
    marked = quantized_modules(stored, lambda last, _: last in _MARKS, ("qzeros",))
    for module, tensors, rule in ruled_modules(marked, rule_of):
        if rule.desc_act and rule.group != -1 and "g_idx" not in tensors and indexed:
            raise SchemeError(
                tensors["qweight"].source,
                f"no {module}.g_idx, where {indexed} is there and desc_act says that columns moved",
                "the group of every column, for all modules or for none",
                "download the checkpoint again",
            )
        weights[f"{module}.weight"] = module_weight(module, tensors, rule)
        used.update(f"{module}.{name}" for name in _TENSORS)
    return weights, used


def module_weight(module: str, tensors: Mapping[str, StoredTensor], rule: Rule) -> WeightRef:
    """One quantized weight."""
    qweight = need_tensor(tensors, "qweight", module, (torch.int32,))
    scales = need_tensor(tensors, "scales", module, SCALES)
    for name, dtypes, dimensions in (
        ("qzeros", (torch.int32,), 2),
        ("g_idx", (torch.int32, torch.int64), 1),
    ):
        if name in tensors:
            need_tensor(tensors, name, module, dtypes, (dimensions,))
    n, (groups, _) = qweight.shape[1], scales.shape
    index = tensors["g_idx"].load() if "g_idx" in tensors else None
    k = _columns(qweight, rule, index, groups)
    group = k if rule.group == -1 else min(rule.group, k)
    _check_shapes(tensors, rule, (n, k), group)
    order = group_order(index, k, group, tensors["g_idx"].source) if index is not None else None
    form: AffineForm = "symmetric" if rule.sym else "zero"
    spec = AffineSpec(rule.bits, group, form, scales.dtype, order or "sequential")
    parts = _Parts(tensors, rule, spec, (n, k), index)
    return WeightRef(
        f"{module}.weight",
        spec,
        NAME,
        (n, k),
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
    index: torch.Tensor | None

    def read(self, rows: Rows) -> QuantizedTensor:
        if not isinstance(rows, slice):
            return self.read(slice(0, self.shape[0])).take_rows(rows)
        start, stop, _ = rows.indices(self.shape[0])
        parts = {
            "qweight": self.tensors["qweight"].part(1, start, stop),
            "scales": self.tensors["scales"].part(1, start, stop),
        }
        zeros = self._zeros(start, stop)
        if zeros is not None and self.rule.sym:
            self._check_symmetric(zeros)
        if not self.rule.sym:
            assert zeros is not None
            parts["zeros"] = zeros
        if self.spec.order != "sequential":
            assert self.index is not None
            parts["g_idx"] = self.index.to(torch.int32)
        return QuantizedTensor(self.spec, NAME, (stop - start, self.shape[1]), parts)

    def _zeros(self, start: int, stop: int) -> torch.Tensor | None:
        stored = self.tensors.get("qzeros")
        if stored is None or stop <= start:
            return None if self.rule.sym else torch.zeros((self._groups, 0), dtype=torch.uint8)
        bits, first = self.rule.bits, start // _ALIGN * _ALIGN
        words = stored.part(1, words_for(first, bits), words_for(stop, bits))
        if not self.rule.sym and looks_damaged(words, bits, self.rule.zeros):
            warnings.warn(
                f"{stored.source}: some words of zero points end in fields of ones; if the packer "
                "let a zero point of 0 run over its word, their true values are lost",
                stacklevel=2,
            )
        return read_zeros(words, bits, self.rule.zeros, stop - first)[:, start - first :]

    @property
    def _groups(self) -> int:
        return self.tensors["scales"].shape[0]

    def _check_symmetric(self, zeros: torch.Tensor) -> None:
        middle = 1 << (self.rule.bits - 1)
        if bool((zeros == middle).all()):
            return
        found = int(zeros[zeros != middle][0])
        raise SchemeError(
            self.tensors["qzeros"].source,
            f"a zero point of {found}, though the settings say sym ({self.rule})",
            f"zero points of {middle}",
            "correct sym, or checkpoint_format (gptq stores zero points minus one, gptq_v2 as they "
            "are)",
        )


def group_order(index: torch.Tensor, k: int, group: int, source: str) -> GroupOrder:
    """What kind of index assigns columns to groups.

    Args:
        index: the group of every column, ``[K]``.
        k: input columns.
        group: columns of a group.
        source: where the index is stored, for messages.

    Raises:
        SchemeError: a group that does not exist.
    """
    groups = -(-k // group)
    if k and not (0 <= int(index.min()) <= int(index.max()) < groups):
        raise SchemeError(
            source,
            f"groups {int(index.min())} to {int(index.max())}",
            f"groups 0 to {groups - 1}: {k} columns in groups of {group}",
            "check group_size against the tensors",
        )
    plain = torch.arange(k) // group
    if torch.equal(index.long(), plain):
        return "sequential"
    return "permuted" if torch.equal(index.long().sort().values, plain) else "indexed"


# **** checks ****


def _columns(qweight: StoredTensor, rule: Rule, index: torch.Tensor | None, groups: int) -> int:
    """K: the words may be padded, so the index or the groups have to tell where they are not."""
    words = qweight.shape[0]
    most = words * 32 // rule.bits
    if index is not None:
        return index.numel()
    if rule.group == -1 or groups == -(-most // rule.group):
        return most
    return min(most, groups * rule.group)


def _check_shapes(
    tensors: Mapping[str, StoredTensor], rule: Rule, shape: tuple[int, int], group: int
) -> None:
    n, k = shape
    groups = -(-k // group)
    wanted = {
        "qweight": (words_for(k, rule.bits), n),
        "scales": (groups, n),
        "qzeros": (groups, words_for(n, rule.bits)),
    }
    for name, needed in wanted.items():
        tensor = tensors.get(name)
        if tensor is None:
            if rule.sym:
                continue
            raise SchemeError(
                tensors["qweight"].source,
                f"no zero points, though the settings say asymmetric ({rule})",
                "qzeros",
                "correct sym, or download the checkpoint again",
            )
        if tensor.shape != needed:
            raise SchemeError(
                tensor.source,
                f"shape {tensor.shape}",
                f"shape {needed} for a weight {shape}, {rule}",
                "check bits and group_size against the tensors",
            )
