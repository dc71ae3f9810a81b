"""ggml through its C interface, as llama-cpp-python ships it.

Comes in: the folder of the shared libraries. Goes out: tensors on the CPU and graphs of a product.
Always holds: a graph runs on as many threads as were asked for; memory of a context lives until
``free``.
"""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path
from typing import Any

from .serve import Refused

Pointer, Size, Long = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64
_CONTEXT = 1 << 20  # bytes: descriptions of a few tensors and of one graph
FLOAT32 = 0
# The number of each type in ggml.h.
TYPES = {
    "q4_0": 2,
    "q4_1": 3,
    "q5_0": 6,
    "q5_1": 7,
    "q8_0": 8,
    "q2_k": 10,
    "q3_k": 11,
    "q4_k": 12,
    "q5_k": 13,
    "q6_k": 14,
    "iq4_nl": 20,
    "iq4_xs": 23,
    "mxfp4": 39,
}


class _Settings(ctypes.Structure):
    """``ggml_init_params``."""

    _fields_ = (("size", Size), ("buffer", Pointer), ("no_alloc", ctypes.c_bool))


def library_folder() -> Path:
    """Where llama-cpp-python of this interpreter keeps its libraries."""
    place = importlib.util.find_spec("llama_cpp")
    if place is None or place.origin is None:
        raise Refused("this interpreter has no llama_cpp")
    return Path(place.origin).parent / "lib"


class Ggml:
    """The functions that are needed, and one CPU backend."""

    def __init__(self, folder: Path, threads: int) -> None:
        self.base = ctypes.CDLL(str(folder / "libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
        self.cpu = ctypes.CDLL(str(folder / "libggml-cpu.so"), mode=ctypes.RTLD_GLOBAL)
        base, cpu = self.base, self.cpu
        self._init = _function(base, "ggml_init", Pointer, _Settings)
        self.free = _function(base, "ggml_free", None, Pointer)
        self._matrix = _function(
            base, "ggml_new_tensor_2d", *(Pointer,) * 2, ctypes.c_int, Long, Long
        )
        self._product = _function(base, "ggml_mul_mat", *(Pointer,) * 4)
        self._graph = _function(base, "ggml_new_graph", Pointer, Pointer)
        self._expand = _function(base, "ggml_build_forward_expand", None, Pointer, Pointer)
        name = "ggml_backend_alloc_ctx_tensors_from_buft"
        self._allocate = _function(base, name, *(Pointer,) * 3)
        self.release = _function(base, "ggml_backend_buffer_free", None, Pointer)
        moved = (None, Pointer, Pointer, Size, Size)
        self.write = _function(base, "ggml_backend_tensor_set", *moved)
        self.read = _function(base, "ggml_backend_tensor_get", *moved)
        numbers = (ctypes.c_int, Pointer, Pointer, Long, Long, Long, Pointer)
        self.quantize = _function(base, "ggml_quantize_chunk", Size, *numbers)
        self._supports = _function(
            base, "ggml_backend_supports_op", ctypes.c_bool, Pointer, Pointer
        )
        self._compute = _function(
            base, "ggml_backend_graph_compute", ctypes.c_int, Pointer, Pointer
        )
        self.backend = _function(cpu, "ggml_backend_cpu_init", Pointer)()
        _function(cpu, "ggml_backend_cpu_set_n_threads", None, Pointer, ctypes.c_int)(
            self.backend, threads
        )
        usual = _function(base, "ggml_backend_get_default_buffer_type", Pointer, Pointer)
        self.plain: int = usual(self.backend)
        self.named = _function(base, "ggml_backend_buft_name", ctypes.c_char_p, Pointer)

    def extra_buffers(self) -> list[int]:
        """Kinds of buffers that rearrange weights for this processor."""
        registry = _function(self.cpu, "ggml_backend_cpu_reg", Pointer)()
        device = _function(self.base, "ggml_backend_reg_dev_get", Pointer, Pointer, Size)
        address = _function(
            self.base, "ggml_backend_reg_get_proc_address", Pointer, Pointer, ctypes.c_char_p
        )
        found = address(registry, b"ggml_backend_dev_get_extra_bufts")
        if not found:
            return []
        give = ctypes.CFUNCTYPE(ctypes.POINTER(Pointer), Pointer)(found)
        kinds: list[int] = []
        listed = give(device(registry, 0))
        for kind in iter(lambda: listed[len(kinds)], None):
            kinds.append(kind)
        return kinds

    def context(self) -> int:
        """Room for descriptions."""
        made: int = self._init(_Settings(_CONTEXT, None, True))
        return made

    def matrix(self, context: int, kind: int, columns: int, rows: int) -> int:
        """Describe a tensor."""
        made: int = self._matrix(context, kind, columns, rows)
        return made

    def allocate(self, context: int, kind: int) -> int | None:
        """Memory for what a context describes and nobody has allocated; None where refused."""
        made: int | None = self._allocate(context, kind)
        return made

    def product(self, context: int, weight: int, x: int) -> tuple[int, int]:
        """The product's tensor, and the graph that computes it."""
        y = self._product(context, weight, x)
        graph = self._graph(context)
        self._expand(graph, y)
        return y, graph

    def run(self, graph: int) -> None:
        """Compute a graph."""
        self._compute(self.backend, graph)

    def supports(self, result: int) -> bool:
        """Whether the CPU backend computes this tensor with its operands where they are."""
        return bool(self._supports(self.backend, result))


def _function(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Any:
    function = getattr(library, name)
    function.restype, function.argtypes = result, list(arguments)
    return function
