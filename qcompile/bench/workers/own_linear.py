"""A kernel of this package as a worker: linears and embeddings.

Comes in: a kernel's name, a target and the dtype of activations. Goes out: answers of a worker.
Always holds: a kernel that refuses a weight says why in its own words; the weight goes the way that
a plan would send it; the error is measured against the stored weight's own decoded values.
"""

from __future__ import annotations

import torch

from qcompile import backends
from qcompile.bench.formats import stored
from qcompile.bench.linear import call_of, pack
from qcompile.edge import find_route
from qcompile.kernel import Kernel, Reject
from qcompile.layout import QuantizedTensor
from qcompile.memory import in_large_pages
from qcompile.site import EmbeddingSite, LinearSite
from qcompile.target import Target
from qcompile.weight import Rows, WeightRef

from .rounds import Built, LinearWorker, copies_for
from .serve import Refused, serve
from .torch_weights import CHECKED, Activations


class Builder:
    """Packs weights for one kernel."""

    def __init__(self, kernel: Kernel, target: Target, dtype: torch.dtype) -> None:
        self.kernel, self.target, self.dtype = kernel, target, dtype

    def linear(self, format: str, n: int, k: int, rotated: int) -> Built:
        """Copies of a weight for products."""
        weight = stored(format, (n, k))
        packed, note = self._packed(weight)
        call, x = call_of(self.kernel, packed), Activations(k, self.dtype)
        parts = tuple(packed.parts.values())
        given, some = x(8), min(n, CHECKED)
        wanted = given.float() @ weight.take_rows(slice(0, some)).dequantize().T
        found = call(given, *parts).float()[:, :some]
        error = float((found - wanted).norm() / wanted.norm())
        more = copies_for(packed.nbytes, rotated) - 1
        # Where the pass that packs a checkpoint's weights would put them.
        copies = [
            tuple(in_large_pages(torch.empty_like(part)).copy_(part) for part in parts)
            for _ in range(more + 1)
        ]
        del weight
        return Built(
            lambda copy, rows: call(x(rows), *copies[copy]),
            len(copies),
            packed.nbytes,
            error,
            note,
        )

    def embedding(self, format: str, n: int, k: int, rotated: int) -> Built:
        """One table, and sets of ids instead of copies."""
        weight = stored(format, (n, k))
        packed, note = self._packed(weight)
        call, parts = call_of(self.kernel, packed), tuple(packed.parts.values())
        draw, made = torch.Generator().manual_seed(n), {}

        def lookup(copy: int, rows: int) -> torch.Tensor:
            if (copy, rows) not in made:
                made[copy, rows] = torch.randint(0, n, (rows,), generator=draw)
            return call(made[copy, rows], *parts)

        found = lookup(0, 64).float()
        wanted = weight.take_rows(made[0, 64]).dequantize()
        error = float((found - wanted).norm() / wanted.norm())
        return Built(lookup, 64, packed.nbytes, error, note)

    def _packed(self, weight: QuantizedTensor) -> tuple[QuantizedTensor, str]:
        wanted = self.kernel.layout or weight.layout
        route = find_route(weight.layout, weight.spec, wanted)
        if route is None:
            raise Refused(f"no edge from {weight.layout} to {wanted}")

        def read(rows: Rows) -> QuantizedTensor:
            return weight.take_rows(rows)

        there = WeightRef("bench", route.spec, wanted, weight.shape, read, "memory")
        kind = LinearSite if self.kernel.kind == "linear" else EmbeddingSite
        verdict = self.kernel.accepts(kind("bench", there), self.target)
        if isinstance(verdict, Reject):
            raise Refused(verdict.reason)
        return pack(weight, wanted) if route.edges else weight, verdict.note


def main(name: str, target: str, dtype: str) -> None:
    """Serve."""
    from qcompile.bench.kernel_cases import kernels_of

    torch.set_grad_enabled(False)
    where = Target.parse(target)
    backends.load(where.kind).prepare()
    [kernel] = [k for k in kernels_of(where.kind) if k.name == name]
    builder = Builder(kernel, where, getattr(torch, dtype))
    build = builder.linear if kernel.kind == "linear" else builder.embedding
    serve(LinearWorker({kernel.kind: build}, {"torch": torch.__version__}))
