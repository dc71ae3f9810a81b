"""What this machine has. The only file of the backend that asks.

``QCOMPILE_CXX`` names the compiler, or ``none`` to do without; ``QCOMPILE_CPU_ISA`` is ``generic``
to run the portable kernels, or ``avx2`` to leave AVX-512 alone. Any other value chooses nothing:
a variant that the machine lacks cannot be asked for.
"""

from __future__ import annotations

import functools
import os
import platform
import shutil
import subprocess
from pathlib import Path

_COMPILERS = ("g++", "c++", "clang++")
_ARM = ("aarch64", "arm64")  # as Linux and macOS call it
_X86 = ("x86_64", "AMD64")


def find_compiler() -> str | None:
    """Path of a C++ compiler, or None."""
    named = os.environ.get("QCOMPILE_CXX") or os.environ.get("CXX")
    if named == "none":
        return None
    candidates = (named,) if named else _COMPILERS
    return next((found for name in candidates if (found := shutil.which(name))), None)


def missing_compiler() -> str | None:
    """Why native kernels cannot be built here, or None when they can."""
    if find_compiler():
        return None
    tried = os.environ.get("QCOMPILE_CXX") or os.environ.get("CXX") or ", ".join(_COMPILERS)
    return f"no C++ compiler was found (tried {tried}); install one or set QCOMPILE_CXX"


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Feature names that the operating system reports; empty where it reports none."""
    if platform.system() == "Darwin":
        return _apple_flags()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        if line.startswith(("flags", "Features")):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def _apple_flags() -> frozenset[str]:
    """What macOS says of an ARM processor, in Linux's words."""
    command = ["sysctl", "-n", "hw.optional.arm.FEAT_DotProd"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return frozenset()
    return frozenset({"asimddp"}) if done.stdout.strip() == "1" else frozenset()


_AVX512 = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "f16c"})
_AVX2 = frozenset({"avx2", "fma", "f16c"})


def variant() -> str:
    """Which native kernels this machine runs: ``avx512``, ``avx2``, ``neon`` or ``generic``."""
    asked = os.environ.get("QCOMPILE_CPU_ISA")
    if asked == "generic":
        return "generic"
    flags = cpu_flags()
    if platform.machine() in _ARM:
        return "neon" if "asimddp" in flags else "generic"
    if platform.machine() not in _X86 or not flags >= _AVX2:
        return "generic"
    return "avx512" if flags >= _AVX512 and asked != "avx2" else "avx2"


def host_arch() -> str:
    """The architecture of ``Target`` that describes this machine."""
    if platform.machine() in _ARM:
        return variant()
    flags = cpu_flags()
    if os.environ.get("QCOMPILE_CPU_ISA") == "generic":
        return "generic"
    if {"amx_int8", "amx_bf16"} <= flags:
        return "amx"
    if "avx512_vnni" in flags:
        return "avx512_vnni"
    if "avx512f" in flags:
        return "avx512"
    return "avx2" if {"avx2", "fma", "f16c"} <= flags else "generic"


def fallback_note(note: str) -> str:
    """A plan's note of a kernel that needs no compiler; first the reason, where there is none."""
    return note if find_compiler() else f"no C++ compiler was found: {note}"
