"""``cuda.triton_embedding``: decode the looked-up rows of a planar weight, and no others.

Comes in: ids of any shape. Goes out: rows in the wanted dtype, the decoded weight rounded once.
Always holds: it reads the layout of ``cuda.triton_linear``, so a tied embedding and head share one
packed copy; on a device an id that does not exist gives NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from qcompile.backends.cuda.coding import coding_of
from qcompile.backends.cuda.layouts import LAYOUTS, is_permuted, layout_name
from qcompile.backends.cuda.triton_linear import wrong_place
from qcompile.kernel import Accept, Reject, Tolerance
from qcompile.layout import QuantizedTensor
from qcompile.ops import encode_meaning
from qcompile.site import Site
from qcompile.target import Target

# A lookup reads some rows of many.
_SHARE = 0.01


@dataclass(frozen=True)
class TritonEmbedding:
    """See the module's text.

    Attributes:
        dtype: of the weight's scales.
        activations: dtype of the activations; the scales', unless no kernel takes it.
    """

    dtype: torch.dtype
    activations: torch.dtype

    name = "cuda.triton_embedding"
    kind = "embedding"

    @property
    def layout(self) -> str | None:
        """The layout of its weights."""
        return layout_name(self.dtype)

    @property
    def tolerance(self) -> Tolerance:
        """What scales and offsets round to."""
        eps = torch.finfo(self.dtype).eps
        return Tolerance(2 * eps, "scales and offsets are in the dtype of the activations")

    def accepts(self, site: Site, target: Target) -> Accept | Reject:
        """The same weights as the linear kernel, unless their columns are permuted."""
        weight = site.weight
        reason = wrong_place(site, target, self.activations)
        if reason is None and is_permuted(weight.spec):
            reason = "rows come out with their columns permuted (act-order)"
        if reason is not None:
            return Reject(reason)
        coding = coding_of(weight.spec, weight.shape[1])
        if isinstance(coding, str):
            return Reject(coding)
        size = LAYOUTS[self.dtype].nbytes(weight.spec, weight.shape)
        return Accept(_SHARE * size, f"{coding.low + coding.high} bits, the rows asked for")

    def emit(
        self, graph: fx.Graph, node: fx.Node, parts: Sequence[fx.Node], weight: QuantizedTensor
    ) -> fx.Node:
        """One call that decodes and casts."""
        arguments = (node.args[0], list(parts), encode_meaning(weight), node.args[3])
        return graph.call_function(torch.ops.qcompile.triton_embedding.default, arguments)
