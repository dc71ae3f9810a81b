"""Compile the native kernels on first use and load them.

Comes in: the sources in ``csrc``. Goes out: a loaded library whose ops are registered.
Always holds: nothing is compiled at import or at install; a cache entry belongs to one set of
sources, flags, compiler, torch and machine; a half-written entry is never loaded.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from qcompile.backends.cpu.probe import cpu_flags, find_compiler, missing_compiler, variant
from qcompile.cache import cache_folder
from qcompile.errors import LowerError
from qcompile.observe import log

_SOURCES = Path(__file__).resolve().parent / "csrc"
# -ffp-contract=off: a multiply and an add stay two roundings unless the code says fma, so that
# the decoded value is the one the spec defines.
_FLAGS = ("-O2", "-ftree-vectorize", "-std=c++17", "-fPIC", "-ffp-contract=off", "-w")
# With the first two passes, and with registers allocated loop by loop, g++ keeps sums in memory:
# many rows take up to twice the time. clang does not know them.
_KERNEL_FLAGS = ("-fno-tree-pre", "-fno-gcse", "-fira-region=one")
# The kernels of one variant are compiled: it is built on the machine that runs it.
_VARIANTS = {
    "generic": (),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx512": (
        *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni"),
        *("-mfma", "-mf16c"),
    ),
    "neon": ("-march=armv8.2-a+dotprod",),
}
# These include torch's headers.
_BINDINGS = (
    *("attention.cpp", "binding.cpp", "chain.cpp", "experts.cpp", "experts_layer.cpp"),
    *("gated.cpp", "products.cpp", "repack.cpp", "shims.cpp"),
)
_LANES = ("attend.cpp",)  # written over lanes, as the kernels are
# These leave it to the compiler to use the machine's vectors.
_VECTORISED = ("blocks.cpp", "words.cpp")
_VECTOR_FLAGS = ("-O3",)
# The stable interface of torch 2.11, the oldest release that the project supports.
_STABLE = "-DTORCH_TARGET_VERSION=0x020b000000000000"


@functools.cache
def load_library() -> Path:
    """Build the library unless the cache has it, and load it.

    Returns:
        the path of the loaded file.

    Raises:
        LowerError: there is no compiler, or it failed.
    """
    compiler = find_compiler()
    if compiler is None:
        raise _failure(missing_compiler() or "", "")
    path = cache_folder("kernels") / f"cpu-{_key(compiler)}.so"
    with _lock(path.with_suffix(".lock")):
        if not path.exists():
            _build(compiler, path)
        try:
            torch.ops.load_library(str(path))
        except OSError:
            log("weights", f"{path} does not load; building it again")
            path.unlink()
            _build(compiler, path)
            torch.ops.load_library(str(path))
    return path


def _version(compiler: str) -> list[str]:
    return _run([compiler, "--version"]).stdout.splitlines()[:1]


def _kernel_flags(compiler: str) -> tuple[str, ...]:
    clang = any("clang" in line for line in _version(compiler))
    return () if clang else _KERNEL_FLAGS


def _key(compiler: str) -> str:
    facts = [
        Path(__file__).read_text(encoding="utf-8"),  # which file gets which flags
        *(file.name + file.read_text(encoding="utf-8") for file in sorted(_SOURCES.iterdir())),
        *_FLAGS,
        variant(),
        *_kernel_flags(compiler),
        *_VECTOR_FLAGS,
        *_VARIANTS[variant()],
        _STABLE,
        repr(_version(compiler)),
        torch.__version__,
        platform.machine(),
        *sorted(cpu_flags()),
    ]
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:20]


def _build(compiler: str, path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        commands = [_compilation(compiler, source) for source in _sources()]
        jobs = [_start(command, folder) for command in commands]
        # Wait for every job before the folder goes, whichever of them fails.
        outputs = [job.communicate()[0] for job in jobs]
        for command, job, output in zip(commands, jobs, outputs, strict=True):
            if job.returncode:
                raise _failure(f"the compiler failed: {' '.join(command)}", output)
        objects = [f"{source.stem}.o" for source in _sources()]
        libraries = [f"-L{_torch_folder() / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
        link = [compiler, "-shared", *objects, *libraries, "-o", "out.so"]
        linked = _run(link, folder)
        if linked.returncode:
            raise _failure(f"the linker failed: {' '.join(link)}", linked.stderr)
        os.replace(Path(folder, "out.so"), path)


def _sources() -> list[Path]:
    """The files to compile, in the order in which they are linked."""
    chosen = sorted(_SOURCES.glob(f"kernels_*{variant()}.cpp"))
    files = sorted(_SOURCES.glob("*.cpp"))
    common = [file for file in files if not file.name.startswith("kernels_")]
    return [*common, *chosen]


def _compilation(compiler: str, source: Path) -> list[str]:
    extra: tuple[str, ...] = ()
    if source.name.startswith("kernels_") or source.name in _LANES:
        extra = (*_kernel_flags(compiler), *_VARIANTS[variant()])
    if source.name in _VECTORISED:
        extra = (*_VECTOR_FLAGS, *_VARIANTS[variant()])
    if source.name in _BINDINGS:
        extra = (_STABLE, f"-I{_torch_folder() / 'include'}")
    return [compiler, *_FLAGS, *extra, "-c", str(source), "-o", f"{source.stem}.o"]


def _torch_folder() -> Path:
    return Path(torch.__file__).resolve().parent


def _start(command: list[str], folder: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def _run(command: list[str], folder: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def _failure(found: str, output: str) -> LowerError:
    return LowerError(
        "native CPU kernels",
        found,
        "a C++17 compiler that accepts the sources",
        "install g++, or set QCOMPILE_CXX=none to run the reference kernels",
        reasons=output.splitlines()[:12],
    )


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Let one process build at a time; the others find its result."""
    try:
        import fcntl
    except ImportError:  # not a POSIX system: the rename is still atomic
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)
