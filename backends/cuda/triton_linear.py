"""``cuda.triton_linear``: codes become 16-bit numbers in registers, sums are float32.

Comes in: activations of any leading shape. Goes out: ``x @ w.T + bias`` in the activation's dtype.
Always holds: weights stay packed; the one exception is a product of many rows, for which runs of
outputs are decoded into a buffer that is given back after the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from qcompile.backends.cuda.coding import coding_of
from qcompile.backends.cuda.configs import DECODE_ROWS, DECODED_AT_ONCE
from qcompile.backends.cuda.layouts import DTYPES, LAYOUTS, is_permuted, layout_name
from qcompile.kernel import Accept, Reject, Tolerance
from qcompile.layout import QuantizedTensor
from qcompile.ops import encode_meaning
from qcompile.site import Site
from qcompile.target import Target

_OLDEST = 80


def wrong_device(target: Target, dtype: torch.dtype) -> str | None:
    """Why no Triton kernel runs on a target, or None."""
    if target.kind != "cuda":
        return f"runs on a CUDA device; the target is {target}"
    if target.arch is not None and int(target.arch.removeprefix("sm")) < _OLDEST:
        return f"needs sm{_OLDEST} or newer; the target is {target.arch}"
    if dtype not in DTYPES:
        return f"activations in {dtype}; matrix units take torch.float16 and torch.bfloat16"
    return None


def wrong_place(site: Site, target: Target, dtype: torch.dtype) -> str | None:
    """Why no Triton kernel for matrices takes a site, or None."""
    reason = wrong_device(target, dtype)
    if reason is None and len(site.weight.shape) != 2:
        return f"a weight of {len(site.weight.shape)} dimensions; a matrix is needed"
    return reason


@dataclass(frozen=True)
class TritonLinear:
    """See the module's text.

    Attributes:
        dtype: of the weight's scales.
        activations: dtype of the activations; the scales', unless no kernel takes it.
    """

    dtype: torch.dtype
    activations: torch.dtype

    name = "cuda.triton_linear"
    kind = "linear"

    @property
    def layout(self) -> str | None:
        """The layout of its weights."""
        return layout_name(self.dtype)

    @property
    def tolerance(self) -> Tolerance:
        """What scales, decoded weights and the result round to."""
        eps = torch.finfo(self.dtype).eps
        return Tolerance(2 * eps, "scales, offsets and scaled weights are in the dtype of x")

    def accepts(self, site: Site, target: Target) -> Accept | Reject:
        """Weights whose groups are whole planes of 16 columns."""
        weight = site.weight
        reason = wrong_place(site, target, self.activations)
        if reason is not None:
            return Reject(reason)
        coding = coding_of(weight.spec, weight.shape[1])
        if isinstance(coding, str):
            return Reject(coding)
        size = LAYOUTS[self.dtype].nbytes(weight.spec, weight.shape)
        runs = DECODED_AT_ONCE * self.dtype.itemsize >> 20
        note = f"{coding.low + coding.high} bits in planes of {coding.width}"
        note += f"; from {DECODE_ROWS} rows on, runs of up to {runs} MiB are decoded"
        if weight.activations is not None:
            note += f"; activations stay floats, where the checkpoint allows {weight.activations}"
        return Accept(float(size), note)

    def emit(
        self, graph: fx.Graph, node: fx.Node, parts: Sequence[fx.Node], weight: QuantizedTensor
    ) -> fx.Node:
        """One call for the product and the bias; before it a gather where columns are permuted."""
        bias = node.args[3] if len(node.args) > 3 else None
        x, operands = node.args[0], list(parts)
        if is_permuted(weight.spec):
            gather = (x, -1, operands.pop())
            x = graph.call_function(torch.ops.aten.index_select.default, gather)
        return graph.call_function(
            torch.ops.qcompile.triton_linear.default, (x, operands, encode_meaning(weight), bias)
        )
