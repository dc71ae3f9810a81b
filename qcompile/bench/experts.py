"""How fast a layer of experts is, beside transformers' own on bfloat16 weights.

Comes in: nothing, or ``--tokens 1,128``. Goes out: a table: milliseconds a call of our kernel for
each kind of weight, of transformers' ``grouped_mm`` experts on the decoded weights in bfloat16, and
their ratio; peak memory while packing against the packed bytes.
Always holds: the layer has the shape of Qwen3-30B-A3B (128 experts, hidden 2048, inner 768, top 8);
both sides run in turns in one process, and every call chooses experts anew, so that neither finds
its weights in a cache.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import fx, nn

from qcompile import backends, ops
from qcompile.bench.linear import random_weight
from qcompile.edge import find_route
from qcompile.experts_layout import join_roles, stack_experts
from qcompile.layout import QuantizedTensor
from qcompile.ops_experts import experts
from qcompile.passes.weights.pack import pack
from qcompile.spec import AffineSpec, Role
from qcompile.weight import Rows, WeightRef

EXPERTS, HIDDEN, INNER, TOP = 128, 2048, 768, 8
SPECS = {
    "4-bit g32": AffineSpec(4, 32, "symmetric", torch.float16),
    "q4_k": AffineSpec(4, 32, "offset", torch.float32),
}
_ROUNDS = 15
Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="1,128", help="tokens a call, comma separated")
    counts = [int(text) for text in parser.parse_args().tokens.split(",")]
    backend = backends.load("cpu")
    backend.prepare()
    [kernel] = [k for k in backend.KERNELS if k.name == "cpu.panel_experts"]
    ours: dict[str, Call] = {}
    for name, spec in SPECS.items():
        weight = layer_weight(spec, EXPERTS, HIDDEN, INNER)
        route = find_route(weight.layout, weight.spec, str(kernel.layout))
        assert route is not None
        before = _peak_from_here()
        packed = pack(weight, route)
        grown = (_resident("VmHWM") - before) / packed.nbytes
        print(f"packing {name}: {packed.nbytes / 2**20:.0f} MiB packed, peak {grown:.2f} x that")
        ours[name] = call_of_experts(kernel.emit, packed)
    peer = _peer()
    print(f"{'':12}{'tokens':>8}{'ours ms':>10}{'bf16 ms':>10}{'ratio':>8}")
    for count in counts:
        for name, run in ours.items():
            mine, theirs = _in_turns(run, peer, count)
            print(f"{name:12}{count:8}{mine * 1e3:10.2f}{theirs * 1e3:10.2f}{theirs / mine:8.2f}")


def _peak_from_here() -> int:
    """Forget the peak of the resident set; the bytes that are resident now (Linux only)."""
    Path("/proc/self/clear_refs").write_text("5")
    return _resident("VmRSS")


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"/proc/self/status does not tell {field}")


def layer_weight(spec: AffineSpec, count: int, hidden: int, inner: int) -> WeightRef:
    """All experts of a layer; the matrices repeat, since only their bytes matter here."""

    def member(n: int, k: int) -> WeightRef:
        stored = random_weight(spec, n, k)

        def read(rows: Rows) -> QuantizedTensor:
            return stored.take_rows(rows)

        return WeightRef("member", spec, "affine", (n, k), read, "memory: member")

    up, down = member(inner, hidden), member(hidden, inner)
    roles: dict[Role, WeightRef] = {"gate": up, "up": up, "down": down}
    stacks = [stack_experts(r, {r: [m] * count}, "memory") for r, m in roles.items()]
    return join_roles("experts", stacks)


def call_of_experts(emit: Callable[..., fx.Node], packed: QuantizedTensor) -> Call:
    """What a kernel emits for one layer, as a function of tokens, choices and shares."""
    owner, graph = nn.Module(), fx.Graph()
    x, ids, shares = (graph.placeholder(name) for name in ("x", "ids", "shares"))
    parts = []
    for name, part in packed.parts.items():
        owner.register_buffer(name.replace(".", "_"), part)
        parts.append(graph.get_attr(name.replace(".", "_")))
    arguments = (x, parts, ops.encode_meaning(packed), ids, shares, None, None, "gated silu")
    node = graph.call_function(experts, arguments)
    with graph.inserting_before(node):
        graph.output(emit(graph, node, parts, packed))
    graph.erase_node(node)
    return fx.GraphModule(owner, graph)


def _peer() -> Call:
    """transformers' grouped experts on bfloat16 weights."""
    from transformers.integrations.moe import _default_apply_gate, grouped_mm_experts_forward

    module = nn.Module()
    module.gate_up_proj = nn.Parameter(_bfloat(EXPERTS, 2 * INNER, HIDDEN), requires_grad=False)
    module.down_proj = nn.Parameter(_bfloat(EXPERTS, HIDDEN, INNER), requires_grad=False)
    flags = {"has_gate": True, "has_bias": False, "is_transposed": False}
    more = {"num_experts": EXPERTS, "_is_expert_parallel": False, "has_post_expert_norm": False}
    for name, value in (flags | more).items():
        setattr(module, name, value)
    gate = SimpleNamespace(act_fn=nn.functional.silu)
    object.__setattr__(module, "_apply_gate", lambda x: _default_apply_gate(gate, x))
    return lambda x, ids, shares: grouped_mm_experts_forward(
        module, x.to(torch.bfloat16), ids, shares.to(torch.bfloat16)
    )


def _bfloat(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.02)


def _in_turns(one: Call, other: Call, tokens: int) -> tuple[float, float]:
    """Median seconds of both."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(_ROUNDS + 2):
        draw = torch.Generator().manual_seed(turn)
        x = torch.randn(tokens, HIDDEN, generator=draw)
        chosen = torch.rand(tokens, EXPERTS, generator=draw).topk(TOP)
        for run, found in zip((one, other), times, strict=True):
            start = time.perf_counter()
            run(x, chosen.indices, chosen.values)
            if turn >= 2:
                found.append(time.perf_counter() - start)
    return statistics.median(times[0]), statistics.median(times[1])


if __name__ == "__main__":
    with torch.no_grad():
        main()
