"""Regression by ratio: what this package runs against what torch or numpy does beside it.

Deselected unless asked for: ``pytest tests/benchmarks -m ratio -n 0``. Both sides take turns in one
process, so that a busy machine slows both; the floors are well below what was measured, and well
above what a kernel that lost its way would reach.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import gguf
import pytest
import torch
from torch.nn import functional

from qcompile import backends
from qcompile.backends.cpu.probe import find_compiler
from qcompile.bench.formats import stored
from qcompile.bench.kernel_cases import kernels_of
from qcompile.bench.linear import call_of, pack
from qcompile.edge import find_route
from qcompile.layout import layout_of

pytestmark = [
    pytest.mark.ratio,
    pytest.mark.skipif(find_compiler() is None, reason="kernels need a C++ compiler"),
]
N, K, COPIES, ROUNDS = 4096, 4096, 12, 7
Call = Callable[[], object]


@pytest.fixture(autouse=True)
def prepared() -> Iterator[None]:
    """The kernels are built, and gradients are off."""
    backends.load("cpu").prepare()
    with torch.no_grad():
        yield


def in_turns(ours: Call, peer: Call) -> float:
    """How many times as fast ours is: the median over rounds."""
    ours(), peer()
    found = []
    for _ in range(ROUNDS):
        times = []
        for call in (peer, ours):
            start = time.perf_counter()
            for _ in range(COPIES):
                call()
            times.append(time.perf_counter() - start)
        found.append(times[0] / times[1])
    return statistics.median(found)


def held(benchmark: Any, ours: Call, peer: Call, least: float) -> None:
    """The ratio is at least this; it is a column of pytest-benchmark's record."""
    factor = in_turns(ours, peer)
    benchmark.extra_info["times as fast"] = round(factor, 2)
    benchmark.pedantic(ours, rounds=ROUNDS, iterations=COPIES)
    assert factor >= least, f"{factor:.2f} times as fast, {least} wanted"


def turning(call: Callable[[int], object]) -> Call:
    """Calls with one number after the other, so that no weight stays in a cache."""
    turn = iter(range(1 << 30))
    return lambda: call(next(turn) % COPIES)


@pytest.mark.parametrize(
    ("format", "kernel", "rows", "least"),
    [
        ("4-bit g128", "cpu.panel_linear", 1, 2.5),
        ("q4_k", "cpu.panel_linear", 1, 2.0),
        ("q6_k", "cpu.panel_linear", 1, 1.5),
        ("q8_0", "cpu.panel_linear", 1, 1.2),
        ("4-bit g128", "cpu.panel_linear_int8", 64, 1.0),
        ("4-bit g128", "cpu.panel_linear", 64, 0.6),
    ],
)
def test_linears_against_bfloat16(
    benchmark: Any, format: str, kernel: str, rows: int, least: float
) -> None:
    [found] = [k for k in kernels_of("cpu") if k.name == kernel]
    packed = pack(stored(format, (N, K)), "cpu.panel")
    call, x = call_of(found, packed), torch.randn(rows, K, dtype=torch.bfloat16)
    parts = [tuple(part.clone() for part in packed.parts.values()) for _ in range(COPIES)]
    floats = [torch.randn(N, K).bfloat16() for _ in range(COPIES)]
    held(
        benchmark,
        turning(lambda at: call(x, *parts[at])),
        turning(lambda at: functional.linear(x, floats[at])),
        least,
    )


@pytest.mark.parametrize(("format", "least"), [("q4_k", 10.0), ("q6_k", 10.0), ("q8_0", 3.0)])
def test_repacking_against_numpy(benchmark: Any, format: str, least: float) -> None:
    weight = stored(format, (512, K))
    route = find_route(weight.layout, weight.spec, "cpu.panel")
    assert route is not None
    parts = layout_of("cpu.panel").empty(route.spec, weight.shape)
    data, kind = weight.parts["data"].numpy(), gguf.GGMLQuantizationType[format.upper()]
    held(
        benchmark,
        lambda: route.fill(weight, parts, "bench"),
        lambda: gguf.quants.dequantize(data, kind),
        least,
    )
