"""``cuda.humming``: why no plan uses the package ``humming-kernels`` yet.

Comes in: a linear site. Goes out: a refusal that says what is missing.
Always holds: it accepts nothing, and says whether the package is here.

The package (read at release 0.1.20) multiplies by integers of 1 to 8 bits in groups of 16 or more.
Its calls are known (``humming.ops.humming_gemm``), but its weights are put in order by CUDA kernels
that it compiles on the device (``humming.ops.repack_weight`` takes CUDA tensors only), and what
they write is not documented. Weights here are packed ahead of time, often where there is no device.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from qcompile.errors import LowerError
from qcompile.kernel import Accept, Reject, Tolerance
from qcompile.layout import QuantizedTensor
from qcompile.site import Site
from qcompile.target import Target

PACKAGE, MODULE, VERSION = "humming-kernels", "humming", "0.1.20"
_WHY = "not adapted, because it orders weights with kernels that run on the device only"


@dataclass(frozen=True)
class Humming:
    """See the module's text."""

    name = "cuda.humming"
    kind = "linear"
    layout: str | None = None
    tolerance: Tolerance = Tolerance(0.0, "it computes nothing")

    def accepts(self, site: Site, target: Target) -> Accept | Reject:
        """No site."""
        if target.kind != "cuda":
            return Reject(f"runs on a CUDA device; the target is {target}")
        if importlib.util.find_spec(MODULE) is None:
            return Reject(f"package {PACKAGE} is not installed, and {_WHY}")
        return Reject(f"package {PACKAGE} is installed, but {_WHY}")

    def emit(
        self, graph: fx.Graph, node: fx.Node, parts: Sequence[fx.Node], weight: QuantizedTensor
    ) -> fx.Node:
        """Never called by a plan, which holds no site of this kernel."""
        raise LowerError(
            self.name, "a call was asked for", "a kernel that accepts the site", "plan again"
        )
