"""How fast weights become panels, beside what other decoders of the same bytes do.

Comes in: ``python -m qcompile.bench.transforms [--ggml FILE] [type ...]``; ``FILE`` is a build of
``libggml-base``, whose ``to_float`` is then timed too. Goes out: one line a type, GB of stored
bytes a second: *edge*, the edge alone, to memory that is there; *pack*, the pass that streams runs
of rows through it, to memory that the system has yet to hand out; *codes*, the way over one byte a
code; *gguf*, ``gguf.dequantize`` of numpy; *ggml*, ``to_float`` on as many threads as the edge has,
into a buffer that stays in a cache.
Always holds: all figures of a line come from one run over the same bytes, which go round more
memory than a cache holds; a figure is the median of at least five calls.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import threading
import warnings
from collections.abc import Callable

import gguf
import numpy as np
import torch

from qcompile import backends
from qcompile.bench.linear import measure, pin_threads
from qcompile.edge import Route, edges, find_route
from qcompile.layout import QuantizedTensor, layout_of
from qcompile.passes.weights.pack import pack
from qcompile.schemes import scheme_of
from qcompile.schemes.awq.layout import GEMM
from qcompile.schemes.gguf.blocks import BLOCKS
from qcompile.spec import AffineSpec, Spec
from qcompile.weight import Rows, WeightRef

_N, _K, _COPIES = 4096, 14336, 4
_WORDS = {
    "gptq 4 bits": ("gptq", 4, "sequential"),
    "gptq act-order": ("gptq", 4, "permuted"),
    "gptq 8 bits": ("gptq", 8, "sequential"),
    "gptq 3 bits": ("gptq", 3, "sequential"),
    "awq": (GEMM, 4, "sequential"),
    "ct.packed": ("ct.packed", 4, "sequential"),
}


def blocks(name: str, seed: int) -> QuantizedTensor:
    """A weight of a GGUF type from random bytes."""
    spec = BLOCKS[name].spec
    return _random(spec, f"gguf.{name}", seed)


def words(layout: str, bits: int, order: str, seed: int) -> QuantizedTensor:
    """A weight in a scheme's words, from random bytes."""
    spec = AffineSpec(bits, 128, "zero", torch.float16, order)  # type: ignore[arg-type]
    weight = _random(spec, layout, seed)
    if order == "permuted":
        index = torch.arange(_K, dtype=torch.int32) // spec.group
        weight.parts["g_idx"].copy_(index[torch.randperm(_K)])
    return weight


def _random(spec: Spec, layout: str, seed: int) -> QuantizedTensor:
    draw, parts = torch.Generator().manual_seed(seed), {}
    for field in layout_of(layout).fields(spec, (_N, _K)):
        data = torch.randint(0, 256, (field.nbytes,), generator=draw, dtype=torch.uint8)
        parts[field.name] = data.view(field.dtype).view(field.shape)
    return QuantizedTensor(spec, layout, (_N, _K), parts)


def rate(call: Callable[[QuantizedTensor], object], weights: list[QuantizedTensor]) -> float:
    """Stored GB a second, the median."""
    runners = [lambda w=weight: call(w) for weight in weights]
    _, median = measure(runners, least=5, seconds=0.3)
    return weights[0].nbytes / median / 1e9


def into(weight: QuantizedTensor, route: Route) -> Callable[[QuantizedTensor], object]:
    """The direct edge, to the same parts every time."""
    [edge], parts = route.edges, layout_of("cpu.panel").empty(route.spec, weight.shape)
    assert edge.fill is not None
    fill = edge.fill
    return lambda given: fill(given, parts)


def over_codes(weight: QuantizedTensor) -> Route:
    """The route that unpacks to one byte a code."""
    for edge in edges():
        if edge.source == weight.layout and edge.dest in ("affine", "lookup"):
            spec = edge.target_spec(weight.spec)
            rest = None if spec is None else find_route(edge.dest, spec, "cpu.panel")
            if spec is not None and rest is not None:
                return Route((), weight.spec).then(edge, spec).joined(rest)
    raise AssertionError(f"no edge from {weight.layout}")


def streamed(weight: QuantizedTensor, route: Route) -> QuantizedTensor:
    """The weight through the pass that packs runs of rows."""

    def read(rows: Rows) -> QuantizedTensor:
        return weight.take_rows(rows)

    stored = WeightRef("w", weight.spec, weight.layout, weight.shape, read, "memory")
    return pack(stored, route)


# **** others ****


def by_gguf(name: str) -> Callable[[QuantizedTensor], object]:
    """``gguf.dequantize``."""
    kind = gguf.GGMLQuantizationType[name.upper()]
    return lambda weight: gguf.quants.dequantize(weight.parts["data"].numpy(), kind)


class _Traits(ctypes.Structure):
    """``ggml_type_traits`` of ggml.h."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("columns", ctypes.c_int64),
        ("interleave", ctypes.c_int64),
        ("bytes", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
    )


def by_ggml(file: str, name: str) -> Callable[[QuantizedTensor], object]:
    """ggml's ``to_float``, four rows a call, the rows shared between threads."""
    library = ctypes.CDLL(file)
    library.ggml_get_type_traits.restype = ctypes.POINTER(_Traits)
    traits = library.ggml_get_type_traits(int(gguf.GGMLQuantizationType[name.upper()])).contents
    assert traits.bytes == BLOCKS[name].spec.bytes, "another ggml_type_traits"
    count, rows = torch.get_num_threads(), 4

    def part(weight: QuantizedTensor, first: int, last: int) -> None:
        out = np.empty(rows * _K, dtype=np.float32)
        data = weight.parts["data"]
        for row in range(first, last, rows):
            here = data.data_ptr() + row * data.stride(0)
            traits.to_float(here, out.ctypes.data, rows * _K)

    def call(weight: QuantizedTensor) -> None:
        step = -(-weight.shape[0] // (rows * count)) * rows
        jobs = [
            threading.Thread(target=part, args=(weight, at, min(at + step, weight.shape[0])))
            for at in range(0, weight.shape[0], step)
        ]
        for job in jobs:
            job.start()
        for job in jobs:
            job.join()

    return call


# **** tables ****


def _line(name: str, weights: list[QuantizedTensor], others: list[float]) -> None:
    route = find_route(weights[0].layout, weights[0].spec, "cpu.panel")
    assert route is not None
    edge = rate(into(weights[0], route), weights)
    codes = over_codes(weights[0])
    found = [edge, rate(lambda w: streamed(w, route), weights), rate(codes.apply, weights)]
    figures = "".join(f"{value:8.2f}" for value in (*found, *others))
    ratios = "".join(f"{edge / value:8.1f}" for value in others if not math.isnan(value))
    print(f"{name:16}{figures}   {ratios}", flush=True)


def main() -> None:
    """Run the types named on the command line, or all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ggml", default="")
    parser.add_argument("types", nargs="*")
    options = parser.parse_args()
    backends.load("cpu").prepare()
    for scheme in ("gguf", "gptq", "awq", "compressed_tensors"):
        scheme_of(scheme)
    wanted = {e.source.removeprefix("gguf.") for e in edges() if e.dest == "cpu.panel"}
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; {_N} x {_K}; stored GB/s")
    print(f"{'type':16}{'edge':>8}{'pack':>8}{'codes':>8}{'gguf':>8}{'ggml':>8}  edge / both")
    warnings.simplefilter("ignore")
    for name in (name for name in BLOCKS if name in wanted):
        if options.types and name not in options.types:
            continue
        weights = [blocks(name, seed) for seed in range(_COPIES)]
        others = [rate(by_gguf(name), weights)]
        if options.ggml:
            others.append(rate(by_ggml(options.ggml, name), weights))
        _line(name, weights, others)
    for name, facts in _WORDS.items():
        if not options.types or name in options.types:
            _line(name, [words(*facts, seed) for seed in range(_COPIES)], [])


if __name__ == "__main__":
    pin_threads("qcompile.bench.transforms")
    main()
