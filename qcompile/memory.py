"""Memory as the system hands it out: in large pages, and back when it is freed.

Comes in: a tensor, or nothing. Goes out: fewer misses of the address cache, or a smaller resident
set, where the system can do that.
Always holds: nothing that is in use is touched; a dropped cache fills itself again.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import linecache
import math
import mmap
import sys
import threading
from collections.abc import Iterator, Sequence

import torch


@functools.cache
def _library() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "malloc_trim") else None


_HUGEPAGE = 14  # MADV_HUGEPAGE of Linux
_LARGE = 4 << 20  # two of its large pages
_SLAB = 32 << 20
_LINE = 64


def in_large_pages(tensor: torch.Tensor) -> torch.Tensor:
    """A new tensor whose memory the system may back with large pages; the tensor itself.

    Reading weights once a token then takes up to a fifth less time.
    """
    library, size = _library(), tensor.numel() * tensor.element_size()
    if library is not None and size >= _LARGE and tensor.device.type == "cpu":
        page = mmap.PAGESIZE
        start = -(-tensor.data_ptr() // page) * page
        end = (tensor.data_ptr() + size) // page * page
        # Advice: where the kernel has no large pages, it says so and nothing changes.
        library.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _HUGEPAGE)
    return tensor


class Slabs:
    """Room for what stays: small tensors side by side, so that large pages hold them too.

    Each is a storage of its own, as if it were alone. A slab is freed with the last of its tensors;
    pages that nobody has written take no memory.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slab = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._used = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor on the CPU with unset contents; ``torch.empty``'s alignment or a better one."""
        size = math.prod(shape) * dtype.itemsize
        if size == 0 or size > _SLAB // 4:
            return in_large_pages(torch.empty(tuple(shape), dtype=dtype, device="cpu"))
        with self._lock:
            if self._used + size > len(self._slab):
                self._slab = in_large_pages(torch.empty(_SLAB, dtype=torch.uint8, device="cpu"))
                self._used = -self._slab.data_ptr() % _LINE
            room = (ctypes.c_char * size).from_address(self._slab.data_ptr() + self._used)
            room.slab = self._slab  # type: ignore[attr-defined] # the bytes live as long as it
            self._used += -(-size // _LINE) * _LINE
        return torch.frombuffer(room, dtype=dtype).view(tuple(shape))


def release_freed() -> None:
    """Collect cycles and return freed pages: tracing and unpacking leave many behind."""
    gc.collect()
    return_pages()


def return_pages() -> None:
    """Return the pages of what was freed; the C library keeps them, in case they are of use."""
    library = _library()
    if library is not None:
        library.malloc_trim(0)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """No search for cycles inside: where most of what is made stays, it finds nothing to free.

    Freed memory goes back to the system afterwards: the C library keeps that of small objects.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
        return_pages()


def forget_traces() -> None:
    """Drop what only tracing needed once a graph is compiled, and return the memory."""
    # Dynamo reads the source of every function it traces; lines of generated code, which exist
    # nowhere else, have no time of modification.
    files = [name for name, known in linecache.cache.items() if len(known) > 1 and known[1]]
    for name in files:
        linecache.cache.pop(name, None)
    release_freed()
