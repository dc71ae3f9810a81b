"""Give freed memory back to the system.

Comes in: nothing. Goes out: a smaller resident set, where the C library can do that.
Always holds: nothing that is in use is touched; a dropped cache fills itself again.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import linecache
import sys


@functools.cache
def _library() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "malloc_trim") else None


def release_freed() -> None:
    """Collect cycles and return freed pages: tracing and unpacking leave many behind."""
    gc.collect()
    return_pages()


def return_pages() -> None:
    """Return the pages of what was freed; the C library keeps them, in case they are of use."""
    library = _library()
    if library is not None:
        library.malloc_trim(0)


def forget_traces() -> None:
    """Drop what only tracing needed once a graph is compiled, and return the memory."""
    # Dynamo reads the source of every function it traces; lines of generated code, which exist
    # nowhere else, have no time of modification.
    files = [name for name, known in linecache.cache.items() if len(known) > 1 and known[1]]
    for name in files:
        linecache.cache.pop(name, None)
    release_freed()
