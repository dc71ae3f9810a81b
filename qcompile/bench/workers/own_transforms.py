"""The ways from stored bytes to the CPU's layout, and other decoders of the same bytes.

Comes in: a format, then which way to time. Goes out: seconds of each call.
Always holds: *edge* is the edge alone, to memory that is there; *pack* the pass that streams runs
of rows through it, to memory that the system has yet to hand out; *codes* the way over one byte a
code; *gguf* is ``gguf.dequantize`` of numpy, on one thread as everybody calls it; *ggml* is
``to_float`` on as many threads as the edge has, into a buffer that stays in a cache.
"""

from __future__ import annotations

import ctypes
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import torch

from qcompile import backends
from qcompile.bench.formats import gguf_names, stored
from qcompile.edge import Route, edges, find_route
from qcompile.layout import QuantizedTensor, layout_of
from qcompile.passes.weights.pack import pack
from qcompile.weight import Rows, WeightRef

from .rounds import timed_calls
from .serve import Refused, serve

PANEL = "cpu.panel"
_Way = Callable[[QuantizedTensor], object]


class Worker:
    """Answers ``prepare`` and ``time``."""

    def __init__(self, ggml: str) -> None:
        self.ggml = ggml
        self.ways: dict[str, _Way] = {}
        self.weights: list[QuantizedTensor] = []
        self.turn = 0

    def prepare(self, format: str, n: int, k: int, copies: int) -> dict[str, Any]:
        """Make weights; the names of the ways that exist, and bytes of one weight."""
        self.weights = [stored(format, (n, k), seed) for seed in range(copies)]
        first = self.weights[0]
        route = find_route(first.layout, first.spec, PANEL)
        if route is None:
            raise Refused(f"no edge from {first.layout} to {PANEL}")
        self.ways = {"edge": _into(first, route), "pack": lambda weight: _streamed(weight, route)}
        over = _over_codes(first)
        if over is not None:
            self.ways["codes"] = over.apply
        if format in gguf_names():
            self.ways["gguf"] = _by_gguf(format)
            if self.ggml:
                self.ways["ggml"] = _by_ggml(self.ggml, format)
        return {"ways": list(self.ways), "bytes": first.nbytes}

    def time(self, way: str, seconds: float) -> dict[str, Any]:
        """One round: at least one call."""
        call = self.ways[way]

        def once() -> None:
            call(self.weights[self.turn % len(self.weights)])
            self.turn += 1

        return {"seconds": timed_calls(once, seconds)}

    def touch(self) -> dict[str, Any]:
        """Call every way once: libraries are loaded and memory is there afterwards."""
        begin = time.perf_counter()
        for call in self.ways.values():
            call(self.weights[0])
        return {"took": time.perf_counter() - begin}


def _into(weight: QuantizedTensor, route: Route) -> _Way:
    """The direct edge, to the same parts every time."""
    *before, edge = route.edges
    parts = layout_of(PANEL).empty(route.spec, weight.shape)
    fill = edge.fill
    if before or fill is None:
        return route.apply
    return lambda given: fill(given, parts)


def _over_codes(weight: QuantizedTensor) -> Route | None:
    """The route that unpacks to one byte a code."""
    for edge in edges():
        if edge.source == weight.layout and edge.dest in ("affine", "lookup"):
            spec = edge.target_spec(weight.spec)
            rest = None if spec is None else find_route(edge.dest, spec, PANEL)
            if spec is not None and rest is not None:
                return Route((), weight.spec).then(edge, spec).joined(rest)
    return None


def _streamed(weight: QuantizedTensor, route: Route) -> QuantizedTensor:
    """The weight through the pass that packs runs of rows."""

    def read(rows: Rows) -> QuantizedTensor:
        return weight.take_rows(rows)

    return pack(WeightRef("w", weight.spec, weight.layout, weight.shape, read, "memory"), route)


def _by_gguf(name: str) -> _Way:
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


def _by_ggml(file: str, name: str) -> _Way:
    """Four rows a call, the rows shared between threads."""
    library = ctypes.CDLL(file)
    library.ggml_get_type_traits.restype = ctypes.POINTER(_Traits)
    number = gguf.GGMLQuantizationType[name.upper()]
    traits = library.ggml_get_type_traits(int(number)).contents
    if traits.bytes != gguf.GGML_QUANT_SIZES[number][1]:
        raise Refused(f"{file} has another ggml_type_traits")
    count, rows = torch.get_num_threads(), 4

    def part(weight: QuantizedTensor, first: int, last: int) -> None:
        columns, data = weight.shape[1], weight.parts["data"]
        out = np.empty(rows * columns, dtype=np.float32)
        for row in range(first, last, rows):
            here = data.data_ptr() + row * data.stride(0)
            traits.to_float(here, out.ctypes.data, min(rows, last - row) * columns)

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


def main(ggml: str) -> None:
    """Serve; ``ggml`` is a build of ``libggml-base``, or empty."""
    backends.load("cpu").prepare()
    torch.set_grad_enabled(False)
    warnings.simplefilter("ignore")
    serve(Worker(ggml))
