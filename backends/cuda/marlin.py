"""``cuda.marlin4`` and ``cuda.marlin8``: products by an installed operator of the Marlin family.

Comes in: activations of any leading shape. Goes out: ``x @ w.T + bias`` in their dtype.
Always holds: what the operators refuse is refused here, by rules that name their source, before a
weight is read; the packages are never needed. Weights are packed without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from qcompile.backends.cuda import marlin_edges as _edges  # noqa: F401 - registers edges
from qcompile.backends.cuda import schemas
from qcompile.backends.cuda.installed import find
from qcompile.backends.cuda.marlin_call import marlin_linear
from qcompile.backends.cuda.marlin_layout import LAYOUTS, Order, is_permuted, padded
from qcompile.backends.cuda.schemas import Operator
from qcompile.backends.rules import Rule, broken, name_of, unless
from qcompile.kernel import Accept, Reject, Tolerance
from qcompile.layout import QuantizedTensor
from qcompile.site import Site
from qcompile.spec import AffineSpec
from qcompile.target import Target

GROUPS = (32, 64, 128)
_FIRST = 80  # compute capability
_VLLM = "vllm 0.33.0 marlin.cu"
# Beside other kernels that read the same bytes.
PREFERENCE = 0.9


@dataclass(frozen=True)
class MarlinWeight:
    """One matrix, as the rules look at it.

    Attributes:
        spec: as it lies before padding.
        columns: K.
        bits: of a stored code.
    """

    spec: AffineSpec
    columns: int
    bits: int

    @property
    def zero(self) -> bool:
        """Whether it has zero points."""
        return self.spec.form == "zero"


@dataclass(frozen=True)
class MarlinCall:
    """What the rules look at.

    Attributes:
        target: the device.
        dtype: of the activations.
        weight: the matrix.
        operators: what might be called, in the order of preference.
    """

    target: Target
    dtype: torch.dtype
    weight: MarlinWeight
    operators: Sequence[Operator]


def _kind(call: MarlinCall) -> str | None:
    return unless(call.target.kind == "cuda", f"the target is {call.target}")


def _arch(call: MarlinCall) -> str | None:
    arch = call.target.arch
    return unless(arch is None or int(arch.removeprefix("sm")) >= _FIRST, f"the target is {arch}")


def _dtype(call: MarlinCall) -> str | None:
    return unless(call.dtype in schemas.HALVES, f"they are {name_of(call.dtype)}")


def _type(call: MarlinCall) -> str | None:
    weight = call.weight
    if any(one.takes(call.dtype, weight.bits, weight.zero) for one in call.operators):
        return None
    return f"codes of {weight.spec.bits} bits, stored in {weight.bits}, have zero points"


def _group(call: MarlinCall) -> str | None:
    group, columns = call.weight.spec.group, call.weight.columns
    return unless(group in GROUPS or group >= columns, f"the group is {group}, K is {columns}")


RULES: tuple[Rule[MarlinCall], ...] = (
    Rule("the device must be a CUDA device", _VLLM, _kind),
    Rule("the device must be sm80 or newer", _VLLM, _arch),
    Rule("activations must be float16 or bfloat16", _VLLM, _dtype),
    Rule("codes must be symmetric, or of 4 bits (8 in gptqmodel)", _VLLM, _type),
    Rule("the group must be 32, 64, 128 or all of K", _VLLM, _group),
)


def choose(
    operators: Sequence[Operator],
    target: Target,
    dtype: torch.dtype,
    weights: Sequence[MarlinWeight],
) -> Operator | str:
    """The operator that takes weights, or why none does.

    Args:
        operators: those that would do, in the order of preference.
        target: the device.
        dtype: of the activations.
        weights: what one operator has to take.
    """
    for weight in weights:
        rule = broken(RULES, MarlinCall(target, dtype, weight, operators))
        if rule is not None:
            return rule
    fitting = [one for one in operators if all(one.takes(dtype, w.bits, w.zero) for w in weights)]
    return find(fitting)


def padding(spec: AffineSpec, n: int, k: int) -> str:
    """What a plan tells of padding: empty where N and K stay."""
    size = padded(spec, k)
    if (size.rows(n), size.columns) == (n, k):
        return ""
    return f", padded from {n} x {k} to {size.rows(n)} x {size.columns}"


@dataclass(frozen=True)
class MarlinLinear:
    """See the module's text.

    Attributes:
        order: how the weight lies.
        activations: dtype of the activations; the order's, unless no operator takes it.
    """

    order: Order
    activations: torch.dtype

    kind = "linear"

    @property
    def name(self) -> str:
        """The kernel's name."""
        return f"cuda.marlin{self.order.bits}"

    @property
    def layout(self) -> str | None:
        """The layout of its weights."""
        return self.order.name

    @property
    def tolerance(self) -> Tolerance:
        """What decoding and the result round to."""
        eps = torch.finfo(self.order.dtype).eps
        return Tolerance(2 * eps, "scales and decoded weights are in the dtype of x")

    def accepts(self, site: Site, target: Target) -> Accept | Reject:
        """Weights whose types, groups and device the operators take."""
        weight, spec = site.weight, site.weight.spec
        if len(weight.shape) != 2:
            return Reject(f"a weight of {len(weight.shape)} dimensions; a matrix is needed")
        assert isinstance(spec, AffineSpec)
        n, k = weight.shape
        described = MarlinWeight(spec, k, self.order.bits)
        found = choose(schemas.LINEAR, target, self.activations, [described])
        if isinstance(found, str):
            return Reject(found)
        note = f"{found.name}{padding(spec, n, k)}"
        if is_permuted(spec):
            note += ", input gathered (act-order)"
        size = LAYOUTS[self.order.name].nbytes(spec, weight.shape)
        return Accept(PREFERENCE * size, note)

    def emit(
        self, graph: fx.Graph, node: fx.Node, parts: Sequence[fx.Node], weight: QuantizedTensor
    ) -> fx.Node:
        """One call; see ``marlin_call``."""
        named = dict(zip(weight.parts, parts, strict=True))
        bias = node.args[3] if len(node.args) > 3 else None
        return graph.call_function(
            marlin_linear,
            (
                node.args[0],
                named["weight"],
                named["scale"],
                named.get("zero"),
                named.get("columns"),
                bias,
                weight.shape[0],
                self.order.bits,
            ),
        )
