"""The section of ``qcompile.bench.device`` about layers of experts.

Comes in: a run. Goes out: rows: microseconds of a layer, bytes of the experts that were read.
Always holds: the layer has the shape of Qwen3-30B-A3B, tokens choose experts evenly; a result is
compared with the canonical op's before it is timed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from qcompile import ops
from qcompile.backends.cuda.clock import measure
from qcompile.bench.experts import call_of_experts, layer_weight
from qcompile.edge import find_route
from qcompile.kernel import Accept, Kernel
from qcompile.ops_experts import experts
from qcompile.passes.weights.pack import pack
from qcompile.site import ExpertsSite
from qcompile.spec import AffineSpec
from qcompile.weight import WeightRef

if TYPE_CHECKING:
    from qcompile.bench.device_sections import Run

_COUNT, _HIDDEN, _INNER, _TOP = 128, 2048, 768, 8
_TOKENS = (1, 8, 64, 512)


def mixtures(run: Run) -> None:
    """Every kernel for experts, on 4-bit weights in groups of 128."""
    sizes = (4, 128, 128, 2) if run.tiny else (_COUNT, _HIDDEN, _INNER, _TOP)
    count, hidden, inner, top = sizes
    spec = AffineSpec(4, 128, "symmetric", torch.float16)
    weight = layer_weight(spec, count, hidden, inner)
    for kernel in run.backend.kernels(torch.float16):
        if kernel.kind == "experts" and _takes(run, kernel, weight):
            _time(run, kernel, weight, hidden, top)


def _takes(run: Run, kernel: Kernel, weight: WeightRef) -> bool:
    assert kernel.layout is not None
    route = find_route(weight.layout, weight.spec, kernel.layout)
    if route is None:
        return False
    site = ExpertsSite("bench", replace(weight, spec=route.spec, layout=kernel.layout))
    return isinstance(kernel.accepts(site, run.backend.default_target()), Accept)


def _time(run: Run, kernel: Kernel, weight: WeightRef, hidden: int, top: int) -> None:
    assert kernel.layout is not None
    route = find_route(weight.layout, weight.spec, kernel.layout)
    assert route is not None
    packed = pack(weight, route).to(run.device)
    call, meaning = call_of_experts(kernel.emit, packed), ops.encode_meaning(packed)
    for tokens in (3,) if run.tiny else _TOKENS:
        if run.late():
            return
        x = torch.randn(tokens, hidden, device=run.device).half()
        chosen = torch.rand(tokens, weight.shape[0], device=run.device).topk(top)
        given = (x, chosen.indices, chosen.values)
        row = {"kernel": kernel.name, "tokens": tokens}
        if tokens <= 8:
            parts = list(packed.parts.values())
            more = (chosen.indices, chosen.values, None, None, "gated silu")
            wanted = experts(x.float(), parts, meaning, *more)
            error = float((call(*given).float() - wanted).norm() / wanted.norm())
            good = error <= kernel.tolerance.relative_l2
            run.add("correct", {**row, "error": error, "ok": good})
        seconds = measure([lambda given=given: call(*given)], run.device).fastest  # type: ignore[misc]
        read = packed.nbytes * len(chosen.indices.unique()) / weight.shape[0]
        run.add("experts", {**row, "us": seconds * 1e6, "GB/s": read / seconds / 1e9})
