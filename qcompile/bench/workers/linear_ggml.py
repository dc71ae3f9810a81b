"""ggml's ``mul_mat``, in the buffers that llama.cpp would choose.

Comes in: requests. Goes out: answers of a linear layer's worker.
Always holds: a weight is where llama.cpp keeps it by default (a buffer that rearranges it, where
the processor has one for its type), or, as *plain*, as the file has it; activations are float32,
which ggml rounds to 8 bits.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from .ggml import FLOAT32, TYPES, Ggml, library_folder
from .rounds import Built, LinearWorker, copies_for
from .serve import Refused, serve

_MADE = 256  # rows that are quantized; a weight repeats them
_SAME = {"4-bit g32": "q4_0"}  # formats of other names with the same codes and scales


class Builder:
    """Makes weights in one kind of buffer."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.ggml = Ggml(library_folder(), int(os.environ.get("OMP_NUM_THREADS", "1")))
        self.contexts: list[int] = []
        self.buffers: list[int] = []

    def __call__(self, format: str, n: int, k: int, rotated: int) -> Built:
        """Quantize float weights and put copies into buffers."""
        self._clear()
        name = _SAME.get(format, format)
        if name not in TYPES:
            raise Refused(f"no kernel for {format}")
        ggml, kind = self.ggml, self._kind(TYPES[name], n, k)
        some, values = self._rows(TYPES[name], min(n, _MADE), k)
        data = np.ascontiguousarray(np.tile(some, (-(-n // len(some)), 1))[:n])
        size = data.nbytes
        copies = [
            self._put(TYPES[name], n, k, kind, data, size) for _ in range(copies_for(size, rotated))
        ]
        products = _Products(self, copies, k)
        given = products.activations(8)
        wanted = given @ values.T
        found = products.result(0, 8, n)[:, : len(values)]
        error = float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
        note = f"{name} in a buffer of kind {ggml.named(kind).decode()}"
        return Built(products.call, len(copies), size, error, note)

    def described(self) -> int:
        """A context that is freed with the weights."""
        self.contexts.append(self.ggml.context())
        return self.contexts[-1]

    def allocate(self, context: int, kind: int) -> None:
        """Memory that is freed with the weights."""
        buffer = self.ggml.allocate(context, kind)
        if buffer is None:
            raise Refused("ggml has no memory for it")
        self.buffers.append(buffer)

    def _kind(self, number: int, n: int, k: int) -> int:
        """The first kind of buffer in which the product is supported."""
        ggml = self.ggml
        for kind in ggml.extra_buffers() if self.where == "default" else ():
            context = ggml.context()
            weight = ggml.matrix(context, number, k, n)
            buffer = ggml.allocate(context, kind)
            x = ggml.matrix(context, FLOAT32, k, 8)
            fits = buffer is not None and ggml.supports(ggml.product(context, weight, x)[0])
            if buffer is not None:
                ggml.release(buffer)
            ggml.free(context)
            if fits:
                return kind
        return ggml.plain

    def _put(self, number: int, n: int, k: int, kind: int, data: Any, size: int) -> int:
        context = self.described()
        weight = self.ggml.matrix(context, number, k, n)
        self.allocate(context, kind)
        self.ggml.write(weight, data.ctypes.data, 0, size)
        return weight

    def _rows(self, number: int, rows: int, k: int) -> tuple[Any, Any]:
        """Quantized rows, uint8, and what they mean, float32."""
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        weights = np.random.default_rng(k).standard_normal((rows, k), dtype=np.float32) * 0.02
        data = np.empty(rows * k * 2, np.uint8)
        given = weights.ctypes.data, data.ctypes.data
        size = self.ggml.quantize(number, *given, 0, rows, k, None)
        found = data[:size].reshape(rows, -1)
        decode: Any = dequantize
        kind: Any = GGMLQuantizationType
        return found, decode(found, kind(number))

    def _clear(self) -> None:
        for buffer in self.buffers:
            self.ggml.release(buffer)
        for context in self.contexts:
            self.ggml.free(context)
        self.buffers, self.contexts = [], []


class _Products:
    """One graph for each copy and number of rows."""

    def __init__(self, builder: Builder, copies: list[int], k: int) -> None:
        self.builder, self.copies, self.k = builder, copies, k
        self.inputs: dict[int, int] = {}
        self.made: dict[tuple[int, int], tuple[int, int]] = {}

    def call(self, copy: int, rows: int) -> None:
        """Compute one product."""
        if (copy, rows) not in self.made:
            self._make(copy, rows)
        self.builder.ggml.run(self.made[copy, rows][1])

    def activations(self, rows: int) -> Any:
        """Float32 ``[rows, k]``."""
        return np.random.default_rng(rows).standard_normal((rows, self.k), dtype=np.float32)

    def result(self, copy: int, rows: int, n: int) -> Any:
        """The product, float32 ``[rows, n]``."""
        self.call(copy, rows)
        out = np.empty((rows, n), np.float32)
        self.builder.ggml.read(self.made[copy, rows][0], out.ctypes.data, 0, out.nbytes)
        return out

    def _make(self, copy: int, rows: int) -> None:
        builder, ggml = self.builder, self.builder.ggml
        if rows not in self.inputs:
            context = builder.described()
            self.inputs[rows] = ggml.matrix(context, FLOAT32, self.k, rows)
            builder.allocate(context, ggml.plain)
            given = self.activations(rows)
            ggml.write(self.inputs[rows], given.ctypes.data, 0, given.nbytes)
        context = builder.described()
        made = ggml.product(context, self.copies[copy], self.inputs[rows])
        builder.allocate(context, ggml.plain)
        self.made[copy, rows] = made


def main(where: str) -> None:
    """Serve; ``where`` is ``default`` or ``plain``."""
    from importlib.metadata import version

    found = {"llama-cpp-python": version("llama-cpp-python")}
    serve(LinearWorker({"linear": Builder(where)}, found))
