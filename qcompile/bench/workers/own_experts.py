"""A layer of experts: kernels of this package, and transformers' own.

Comes in: requests. Goes out: seconds of a call of each.
Always holds: everybody gets the same tokens and choices, one after the other; the peer has as many
weights, of bfloat16.
"""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from qcompile import backends
from qcompile.bench.experts import (
    HIDDEN,
    INNER,
    PEER,
    SPECS,
    TOP,
    Call,
    call_of_experts,
    layer_weight,
)
from qcompile.bench.kernel_cases import kernels_of
from qcompile.bench.machine import versions
from qcompile.edge import find_route
from qcompile.passes.weights.pack import pack

from .serve import memory, serve


class Worker:
    """Answers ``facts``, ``prepare`` and ``time``."""

    def __init__(self) -> None:
        self.calls: dict[str, Call] = {}
        self.experts = 0

    def facts(self) -> dict[str, Any]:
        """Versions of the packages."""
        return {"versions": versions("transformers")}

    def prepare(self, format: str, experts: int) -> dict[str, Any]:
        """Pack a layer; bytes, the peak of packing against them, kernels that run it."""
        if not self.calls:
            self.experts, self.calls[PEER] = experts, _transformers(experts)
        weight = layer_weight(SPECS[format], experts, HIDDEN, INNER)
        kernels = [
            k for k in kernels_of("cpu") if k.kind == "experts" and k.layout == "cpu.panel_experts"
        ]
        route = find_route(weight.layout, weight.spec, str(kernels[0].layout))
        assert route is not None
        before = _forget_peak()
        packed = pack(weight, route)
        grown = None if before is None else (memory("VmHWM") - before) / packed.nbytes
        for kernel in kernels:
            self.calls[f"{format} {kernel.name}"] = call_of_experts(kernel.emit, packed)
        names = [kernel.name for kernel in kernels]
        return {"bytes": packed.nbytes, "grown": grown, "kernels": names}

    def time(self, tokens: int, seed: int) -> dict[str, Any]:
        """One call of each."""
        draw = torch.Generator().manual_seed(seed)
        x = torch.randn(tokens, HIDDEN, generator=draw)
        chosen = torch.rand(tokens, self.experts, generator=draw).topk(TOP)
        found = {}
        for name, call in self.calls.items():
            start = time.perf_counter()
            call(x, chosen.indices, chosen.values)
            found[name] = time.perf_counter() - start
        return {"seconds": found}


def _forget_peak() -> int | None:
    """Forget the peak of the resident set; bytes that are resident now, None where not Linux."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return None
    return memory("VmRSS")


def _transformers(experts: int) -> Call:
    """Its grouped experts on bfloat16 weights."""
    from transformers.integrations.moe import _default_apply_gate, grouped_mm_experts_forward

    module = nn.Module()
    module.gate_up_proj = nn.Parameter(_bfloat(experts, 2 * INNER, HIDDEN), requires_grad=False)
    module.down_proj = nn.Parameter(_bfloat(experts, HIDDEN, INNER), requires_grad=False)
    flags = {"has_gate": True, "has_bias": False, "is_transposed": False}
    more = {"num_experts": experts, "_is_expert_parallel": False, "has_post_expert_norm": False}
    for name, value in (flags | more).items():
        setattr(module, name, value)
    gate = SimpleNamespace(act_fn=nn.functional.silu)
    object.__setattr__(module, "_apply_gate", lambda x: _default_apply_gate(gate, x))
    return lambda x, ids, shares: grouped_mm_experts_forward(
        module, x.to(torch.bfloat16), ids, shares.to(torch.bfloat16)
    )


def _bfloat(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.02)


def main() -> None:
    """Serve."""
    torch.set_grad_enabled(False)
    backends.load("cpu").prepare()
    serve(Worker())
