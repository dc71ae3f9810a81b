"""How fast the linear kernels of this machine's CPU are, beside what memory and torch allow.

Comes in: nothing; ``python -m qcompile.bench.linear [word ...]`` keeps the sections named.
Goes out: one table a section. ``decode``: one row of activations, bytes of packed weight a second
against this run's read bandwidth. ``small``: microseconds a call, Python included. ``prefill``:
multiplications against ``F.linear`` on the decoded weight. ``embedding``, ``pack``: what they say.
Always holds: threads are pinned, weights rotate over more memory than any cache, and the two sides
of a ratio come from one run; every figure is the fastest and the median of at least five calls.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import fx
from torch.nn import functional

from qcompile import backends
from qcompile.bench.formats import random_weight
from qcompile.edge import find_route
from qcompile.kernel import Kernel
from qcompile.layout import QuantizedTensor
from qcompile.ops import embedding, linear
from qcompile.spec import AffineSpec, LookupSpec

_ROTATED = 600 << 20
_F16, _F32 = torch.float16, torch.float32
_TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_SPECS: tuple[AffineSpec | LookupSpec, ...] = (
    AffineSpec(8, 32, "symmetric", _F16),
    AffineSpec(6, 16, "symmetric", _F32),
    AffineSpec(5, 32, "symmetric", _F16),
    AffineSpec(4, 32, "offset", _F32),
    AffineSpec(4, 128, "symmetric", _F16),
    AffineSpec(3, 16, "symmetric", _F32),
    LookupSpec(4, 32, _TABLE, _F16),
)
Runner = Callable[[], object]


def kernel_of(name: str) -> Kernel:
    """A kernel of the CPU backend by its name."""
    backend = backends.load("cpu")
    backend.prepare()
    return next(kernel for kernel in backend.KERNELS if kernel.name == name)


def pack(weight: QuantizedTensor, layout: str) -> QuantizedTensor:
    """The weight in a kernel's layout."""
    route = find_route(weight.layout, weight.spec, layout)
    assert route is not None, f"no edge from {weight.layout} to {layout}"
    return route.apply(weight)


def call_of(kernel: Kernel, weight: QuantizedTensor) -> Callable[..., torch.Tensor]:
    """What the kernel emits for one site, as a function of the input and the weight's parts."""
    graph = fx.Graph()
    first = graph.placeholder("first")
    parts = [graph.placeholder(name) for name in weight.parts]
    op, last = (linear, None) if kernel.kind == "linear" else (embedding, torch.float32)
    node = graph.call_function(op, (first, parts, "", last))
    with graph.inserting_before(node):
        result = kernel.emit(graph, node, parts, weight)
    graph.erase_node(node)
    graph.output(result)
    return fx.GraphModule({}, graph).forward


def copies(weight: QuantizedTensor) -> list[QuantizedTensor]:
    """As many copies as fill more memory than the caches hold."""
    count = max(2, -(-_ROTATED // weight.nbytes))
    return [
        replace(weight, parts={name: part.clone() for name, part in weight.parts.items()})
        for _ in range(count)
    ]


def measure(runners: Sequence[Runner], least: int = 7, seconds: float = 1.0) -> tuple[float, float]:
    """Fastest and median seconds a call, going round the runners at least once."""
    for runner in runners[:2]:
        runner()
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < max(least, len(runners)) or time.perf_counter() - began < seconds:
        start = time.perf_counter()
        runners[len(times) % len(runners)]()
        times.append(time.perf_counter() - start)
    times.sort()
    return times[0], times[len(times) // 2]


def bandwidth() -> float:
    """Bytes a second that all threads read together, the best of several sums."""
    data = torch.ones(_ROTATED // 8, dtype=torch.int64)
    return data.nbytes / measure([data.sum], least=15, seconds=2.0)[0]


def _runners(
    call: Callable[..., torch.Tensor], first: torch.Tensor, weights: Sequence[QuantizedTensor]
) -> list[Runner]:
    def bind(weight: QuantizedTensor) -> Runner:
        parts = tuple(weight.parts.values())
        return lambda: call(first, *parts)

    return [bind(weight) for weight in weights]


# **** sections ****


def _decode(limit: float) -> None:
    kernel = kernel_of("cpu.panel_linear")
    print(f"\nM = 1, read bandwidth {limit / 1e9:.1f} GB/s")
    print(f"{'weight':34} {'min ms':>8} {'median':>8} {'GB/s':>6} {'median':>6} {'of limit':>8}")
    shapes = [(_SPECS[0], 262144, 640), *((spec, 4096, 4096) for spec in _SPECS)]
    for spec, n, k in shapes:
        packed = pack(random_weight(spec, n, k), "cpu.panel")
        call = call_of(kernel, packed)
        best, middle = measure(_runners(call, torch.randn(1, k), copies(packed)))
        rate, usual = packed.nbytes / best, packed.nbytes / middle
        print(
            f"{f'{n} x {k} {spec}':34} {best * 1e3:8.3f} {middle * 1e3:8.3f} {rate / 1e9:6.1f} "
            f"{usual / 1e9:6.1f} {rate / limit:8.0%}"
        )


def _small(limit: float) -> None:
    kernel = kernel_of("cpu.panel_linear")
    print("\nsmall weights, M = 1, bfloat16 activations: microseconds a call")
    print(f"{'weight':34} {'min':>8} {'median':>8} {'GB/s':>6} {'of limit':>8}")
    for n, k in ((1024, 640), (2048, 640), (640, 2048)):
        packed = pack(random_weight(_SPECS[2], n, k), "cpu.panel")
        call = call_of(kernel, packed)
        x = torch.randn(1, k, dtype=torch.bfloat16)
        best, middle = measure(_runners(call, x, copies(packed)))
        print(
            f"{f'{n} x {k} {packed.spec}':34} {best * 1e6:8.1f} {middle * 1e6:8.1f} "
            f"{packed.nbytes / middle / 1e9:6.1f} {packed.nbytes / middle / limit:8.0%}"
        )


def _prefill(limit: float) -> None:
    kernel, n, k = kernel_of("cpu.panel_linear"), 4096, 4096
    print(f"\n{n} x {k}, many rows: GFLOP/s (fastest), and time relative to F.linear")
    print(
        f"{'weight':24} {'M':>4} {'GFLOP/s':>8} {'float32':>8} {'ratio':>6} "
        f"{'bf16':>8} {'ratio':>6}"
    )
    for rows in (16, 128, 512):
        x = torch.randn(rows, k)
        wide = pack(random_weight(_SPECS[0], n, k), "cpu.panel").dequantize()
        thin, thin_x = wide.bfloat16(), x.bfloat16()
        peers = (
            measure([lambda x=x, w=wide: functional.linear(x, w)])[0],  # type: ignore[misc]
            measure([lambda x=thin_x, w=thin: functional.linear(x, w)])[0],  # type: ignore[misc]
        )
        for spec in _SPECS:
            packed = pack(random_weight(spec, n, k), "cpu.panel")
            weights = [packed, *copies(packed)[:8]]
            best, _ = measure(_runners(call_of(kernel, packed), x, weights))
            work = 2e-9 * n * k * rows
            text = f"{spec!s:24} {rows:4} {work / best:8.0f}"
            print(text, *(f"{work / peer:8.0f} {best / peer:6.2f}" for peer in peers))


def _embedding(limit: float) -> None:
    kernel, n, k = kernel_of("cpu.panel_embedding"), 262144, 640
    packed = pack(random_weight(_SPECS[0], n, k), "cpu.panel")
    print("\nembedding of 262144 x 640 uint8: microseconds a call")
    call = call_of(kernel, packed)
    for count in (1, 512):
        ids = [torch.randint(0, n, (count,)) for _ in range(64)]
        best, middle = measure([run for i in ids for run in _runners(call, i, [packed])])
        print(f"{count:5} ids {best * 1e6:10.1f} {middle * 1e6:10.1f}")


def _pack(limit: float) -> None:
    print("\nedge to cpu.panel: MB of codes a second (one byte a code)")
    for spec in _SPECS:
        weight = random_weight(spec, 4096, 2048)
        best, middle = measure([lambda w=weight: pack(w, "cpu.panel")])  # type: ignore[misc]
        size = weight.parts["codes"].nbytes / 1e6
        print(f"{spec!s:24} {size / best:8.0f} {size / middle:8.0f}")


_SECTIONS = {f.__name__[1:]: f for f in (_decode, _small, _prefill, _embedding, _pack)}


def main() -> None:
    """Run the sections named on the command line, or all."""
    limit = bandwidth()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads", end="")
    print(f", read bandwidth {limit / 1e9:.1f} GB/s")
    for name, section in _SECTIONS.items():
        if not sys.argv[1:] or name in sys.argv[1:]:
            section(limit)


def pin_threads(module: str) -> None:
    """Start a module again with OpenMP threads bound to one CPU each: read at its start only."""
    if "OMP_PROC_BIND" in os.environ:
        return
    cpus = sorted(os.sched_getaffinity(0))
    os.environ["OMP_PROC_BIND"] = "close"
    os.environ["OMP_PLACES"] = ",".join(f"{{{cpu}}}" for cpu in cpus)
    os.environ["OMP_NUM_THREADS"] = str(len(cpus))
    os.execv(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]])


if __name__ == "__main__":
    pin_threads("qcompile.bench.linear")
    main()
