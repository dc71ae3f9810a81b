"""Compile what a launch would compile, for a device that is not here.

Comes in: an architecture, then ordinary launches on CPU tensors. Goes out: the binaries.
Always holds: nothing is launched, and no driver is asked; what is compiled is decided by the same
code, from the same sizes and addresses, as on a device, so the binaries are those that a device
would look for in Triton's cache.

Triton asks a *driver* for the target, for a way to load binaries and for one to launch them. The
one here names the target, keeps the binaries and does nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qcompile.backends.cuda import probe
from qcompile.errors import OptionError

_NO_LIMIT = 1 << 30


@dataclass(frozen=True)
class Binary:
    """One compiled kernel.

    Attributes:
        name: of the Triton function.
        code: an ELF file, ``cubin``.
        shared: bytes of shared memory that a block asks for.
        warps: of a block.
        grid: blocks of the launch that compiled it.
    """

    name: str
    code: bytes
    shared: int
    warps: int
    grid: tuple[int, int, int]


class _Utilities:
    """What Triton asks of a driver beside launches."""

    def __init__(self) -> None:
        self.loaded: list[tuple[str, bytes, int]] = []

    def load_binary(self, name: str, code: bytes, shared: int, device: int) -> Any:
        self.loaded.append((name, code, shared))
        place = len(self.loaded) - 1
        return f"module {place}", place, 0, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": _NO_LIMIT}

    def unload_module(self, module: str) -> None:
        """Nothing was loaded."""


class _Driver:
    """See the module's text. A device's number is its architecture's."""

    def __init__(self, arch: int, binaries: list[Binary]) -> None:
        self.arch = arch
        self.utils = _UTILITIES
        self.binaries = binaries

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        def launch(x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
            name, code, shared = self.utils.loaded[function]
            driver = _current()
            driver.binaries.append(Binary(name, code, shared, metadata.num_warps, (x, y, z)))

        return launch

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)


# Compiled kernels stay in Triton's own cache of the process, with the number of their binary.
_UTILITIES = _Utilities()


def _current() -> Any:
    from triton.runtime import driver

    return driver.active


@contextmanager
def compiling(arch: str, cache: Path | None = None) -> Iterator[list[Binary]]:
    """Let launches on CPU tensors compile for an architecture, and keep their binaries.

    Args:
        arch: for instance ``sm90``.
        cache: a folder in the form of Triton's cache, to be used instead of Triton's own.

    Raises:
        OptionError: Triton is not installed, or interprets kernels.
    """
    require_compiler()
    from triton import knobs
    from triton.runtime import driver

    binaries: list[Binary] = []
    before = driver._active
    with knobs.cache.scope():
        if cache is not None:
            knobs.cache.dir = str(cache)
        driver.set_active(_Driver(int(arch.removeprefix("sm")), binaries))
        try:
            yield binaries
        finally:
            driver._active = before


def require_compiler() -> None:
    """Raise where kernels cannot be compiled."""
    missing = probe.missing_triton()
    if missing is None and probe.interpreting():
        missing = f"TRITON_INTERPRET is {os.environ['TRITON_INTERPRET']}: kernels are interpreted"
    if missing is not None:
        raise OptionError(
            "compiling ahead of time",
            missing,
            "the package triton, compiling",
            'pip install "qcompile[cuda]", and leave TRITON_INTERPRET unset',
        )
