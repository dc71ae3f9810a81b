"""How fast a layer of experts is, beside transformers' own on bfloat16 weights.

Comes in: options. Goes out: a report: milliseconds of a layer, by format, contender and tokens, and
the memory that packing takes.
Always holds: the layer has the shape of Qwen3-30B-A3B (hidden 2048, inner 768, 8 of 128 experts
unless fewer are asked for); all sides take turns in one process of pinned threads, and every call
chooses experts anew, so that none finds its weights in a cache.
"""

from __future__ import annotations

import dataclasses
import datetime
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from qcompile import ops
from qcompile.bench.formats import random_weight
from qcompile.bench.machine import machine
from qcompile.bench.model_process import Process, started
from qcompile.bench.peers import Contender
from qcompile.bench.tables import Row, aligned, heading, piped, short, spread, urgent
from qcompile.experts_layout import join_roles, stack_experts
from qcompile.layout import QuantizedTensor
from qcompile.ops_experts import experts
from qcompile.spec import AffineSpec, Role
from qcompile.weight import Rows, WeightRef

HIDDEN, INNER, TOP = 2048, 768, 8
SPECS = {
    "4-bit g32": AffineSpec(4, 32, "symmetric", torch.float16),
    "q4_k": AffineSpec(4, 32, "offset", torch.float32),
}
PEER = "transformers bf16"
_HEAD = ("", "kernel", "tokens", "ms", "(min to max)", f"{PEER} ms", "(min to max)", "x peer")
Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Step = Callable[[str], object]


@dataclass(frozen=True)
class Options:
    """What is measured: formats of ``SPECS``, experts of a layer, tokens of a call."""

    formats: tuple[str, ...]
    experts: int
    tokens: tuple[int, ...]
    rounds: int
    threads: int
    urgent: bool


@dataclass
class Line:
    """Seconds of each call of a kernel of ours, and of the peer in the same round."""

    format: str
    kernel: str
    tokens: int
    ours: list[float] = field(default_factory=list)
    peer: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """How many times as fast as the peer: the median over rounds."""
        return statistics.median(b / a for a, b in zip(self.ours, self.peer, strict=True))


@dataclass
class Report:
    """``packing`` holds packed bytes and how many times as many packing them takes at its peak."""

    options: Options
    machine: dict[str, object]
    date: str
    versions: dict[str, str] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    packing: dict[str, tuple[int, float | None]] = field(default_factory=dict)


def steps(options: Options) -> int:
    """How often ``measure`` reports."""
    return len(options.formats) + len(options.tokens) * (1 + options.rounds)


def measure(options: Options, step: Step = lambda what: None) -> Report:
    """Time the layer.

    Raises:
        BenchError: the process failed.
    """
    report = Report(options, machine(), datetime.date.today().isoformat())
    command = (sys.executable, "-c", _START)
    with started(Contender("experts", command, True, ""), options.threads) as process:
        report.versions = process.ask("facts")["versions"]
        kernels: list[tuple[str, str]] = []
        for format in options.formats:
            step(f"packing {format}")
            made = process.ask("prepare", format=format, experts=options.experts)
            report.packing[format] = (made["bytes"], made["grown"])
            kernels += [(format, name) for name in made["kernels"]]
        for tokens in options.tokens:
            step(f"{tokens} tokens")
            report.lines += _tokens(process, options, kernels, tokens, step)
    return report


_START = "from qcompile.bench.workers.own_experts import main; main()"


def _tokens(
    process: Process, options: Options, kernels: list[tuple[str, str]], tokens: int, step: Step
) -> list[Line]:
    lines = {pair: Line(*pair, tokens) for pair in kernels}
    for number in range(-2, options.rounds):  # two rounds are not counted: they warm caches up
        if number >= 0:
            step(f"{tokens} tokens: round {number + 1}")
        found = process.ask("time", urgent=options.urgent, tokens=tokens, seed=number + 2)
        for (format, kernel), line in lines.items() if number >= 0 else ():
            line.ours.append(found["seconds"][f"{format} {kernel}"])
            line.peer.append(found["seconds"][PEER])
    return list(lines.values())


# **** the layer ****


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


# **** tables ****


def text(report: Report) -> str:
    """The table for a terminal."""
    return "\n".join([*aligned(_rows(report)), "", *_packing(report)])


def markdown(report: Report) -> str:
    """The same with the command, machine, versions and date."""
    options = report.options
    how = (
        f"{options.threads} threads, {options.experts} experts, hidden {HIDDEN}, inner {INNER}, "
        f"{TOP} of them chosen, medians of {options.rounds} rounds in turns"
    )
    given = (command(options), report.date, report.machine, report.versions)
    return "\n".join([*heading(*given, how, _packing(report)), *piped(_rows(report))])


def record(report: Report) -> dict[str, Any]:
    """Everything that was measured."""
    return {"command": command(report.options), **dataclasses.asdict(report)}


def command(options: Options) -> str:
    """The command line that measures the same."""
    tokens = ",".join(map(str, options.tokens))
    given = f"--tokens {tokens} --rounds {options.rounds} --threads {options.threads}"
    return f"qcompile bench experts {given}{urgent(options)}"


def _rows(report: Report) -> list[Row]:
    rows: list[Row] = [_HEAD]
    for line in report.lines:
        ours, peer = (spread([1e3 * t for t in times]) for times in (line.ours, line.peer))
        rows.append((line.format, line.kernel, str(line.tokens), *ours, *peer, short(line.ratio)))
    return rows


def _packing(report: Report) -> list[str]:
    made = []
    for format, (size, grown) in report.packing.items():
        peak = "" if grown is None else f", packed with {grown:.2f} times that at its peak"
        made.append(f"{format}: {size / 2**20:.0f} MiB{peak}")
    return made
