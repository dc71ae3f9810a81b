"""``qcompile doctor``: what this machine has, and what each missing thing costs.

Comes in: nothing. Goes out: text or JSON on stdout; exit code 1 when something that everything
needs is missing, too old, too new or broken.
Always holds: nothing is built and nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import qcompile
from qcompile import schemes
from qcompile.bench.machine import machine
from qcompile.cache import cache_folder
from qcompile.cli.screen import painter, width
from qcompile.cli.survey import Device, Native, Package, devices, native, packages
from qcompile.errors import OptionError
from qcompile.plan_table import Paint, wrapped
from qcompile.plan_text import size_text
from qcompile.visible import visible


@dataclass(frozen=True)
class Survey:
    """Everything a doctor looks at."""

    machine: dict[str, object]
    packages: Sequence[Package]
    devices: Sequence[Device]
    native: Native
    schemes: Sequence[str]
    cache: str
    cache_failure: str

    @property
    def problems(self) -> list[str]:
        """What has to be mended before anything works."""
        found = [f"{p.name}: {_state(p)}" for p in self.packages if p.required and not p.fits]
        found += [f"backend {d.kind}: {d.failure}" for d in self.devices if d.failure]
        return found + ([self.cache_failure] if self.cache_failure else [])


def run_doctor(arguments: argparse.Namespace) -> int:
    """Look, tell, and say by the exit code whether all is well."""
    found = _look()
    if arguments.json:
        print(json.dumps(_record(found), indent=2))
    else:
        print("\n".join(_text(found, width(), painter())))
    return 1 if found.problems else 0


def _look() -> Survey:
    cache, failure = "", ""
    try:
        cache = str(cache_folder("kernels").parent)
    except OptionError as error:
        failure = str(error)
    return Survey(machine(), packages(), devices(), native(), schemes.names(), cache, failure)


def _record(found: Survey) -> dict[str, object]:
    return {
        "qcompile": qcompile.__version__,
        "python": platform.python_version(),
        "executable": sys.executable,
        "machine": found.machine,
        "packages": [{**asdict(p), "fits": p.fits} for p in found.packages],
        "devices": [asdict(device) for device in found.devices],
        "native": asdict(found.native),
        "schemes": list(found.schemes),
        "cache": found.cache,
        "problems": found.problems,
    }


# **** text ****


def _text(found: Survey, limit: int | None, paint: Paint) -> list[str]:
    facts = found.machine
    memory = facts["memory"]
    size = f", {size_text(memory)}" if isinstance(memory, int) else ""
    lines = [
        paint("title", f"qcompile {qcompile.__version__}"),
        *_fact("python", f"{platform.python_version()} at {sys.executable}", limit),
        *_fact("system", f"{facts['system']}", limit),
        *_fact(
            "processor",
            f"{facts['processor']}, {facts['cores']} cores, torch uses {facts['threads']}{size}",
            limit,
        ),
        *_fact("schemes", ", ".join(found.schemes), limit),
        *_fact("cache", found.cache, limit),
        "",
        *_native(found.native, limit, paint),
        "",
        *_devices(found.devices, limit, paint),
        "",
        *_packages(found.packages, limit, paint),
    ]
    if found.problems:
        lines += ["", paint("bad", f"{len(found.problems)} problems")]
        for problem in found.problems:
            lines += wrapped("  ", "    ", visible(problem).replace("\n", " "), limit)
    return lines


def _fact(name: str, text: str, limit: int | None) -> list[str]:
    return wrapped(f"  {name.ljust(12)}", " " * 14, visible(text), limit)


def _native(found: Native, limit: int | None, paint: Paint) -> list[str]:
    lines = [paint("title", "native CPU kernels")]
    if found.missing:
        lines += [paint("bad", line) for line in _fact("missing", found.missing, limit)]
        cost = (
            "linears run as aten's int4 product where activations are bfloat16; others decode the "
            "weight in torch at every call; experts run on the reference, and graphs run eagerly, "
            "without Inductor"
        )
        return lines + wrapped("    ", "    ", cost, limit)
    have = ", ".join(found.features) or "no wide instructions that the system tells of"
    state = "built" if found.built else "not built yet; the first model builds them"
    lines += _fact("compiler", f"{found.compiler}: {found.version}", limit)
    proven = "; tested under emulation, speed not measured" if found.variant == "neon" else ""
    lines += _fact("variant", f"{found.variant} (the processor has {have}){proven}", limit)
    lines += _fact("library", f"{state}: {found.library}", limit)
    return lines


def _devices(found: Iterable[Device], limit: int | None, paint: Paint) -> list[str]:
    lines = [paint("title", "devices")]
    for device in found:
        text = f"{_reach(device)}; {device.kernels} kernels to choose from"
        lines += _fact(device.kind, device.failure or text, limit)
    return lines


def _reach(device: Device) -> str:
    if device.present:
        return f"{device.target}, graphs go to {device.emitter}"
    emulated = ", and --emulate runs on this CPU what can be emulated" if device.emulates else ""
    return f"none here: plans can be made{emulated}"


def _packages(found: Sequence[Package], limit: int | None, paint: Paint) -> list[str]:
    here = [f"{p.name} {p.version}" for p in found if p.fits]
    lines = [paint("title", "packages"), *wrapped("  ", "  ", ", ".join(here), limit)]
    if len(here) < len(found):
        lines += ["", paint("title", "missing, and what that costs")]
    told: set[str] = set()
    for package in found:
        if package.fits or (package.costs and package.costs in told and package.version is None):
            continue
        told.add(package.costs)
        alike = [p.name for p in found if p.costs == package.costs and not p.fits]
        names = ", ".join(alike) if package.costs and package.version is None else package.name
        lines.append("  " + paint("bad" if package.required else "warn", _short(names)))
        text = "; ".join(filter(None, [_state(package), package.costs, _remedy(package)]))
        lines += wrapped("    ", "    ", text, limit)
    return lines


def _short(names: str) -> str:
    first, *rest = names.split(", ")
    return names if len(rest) < 2 else f"{first} and {len(rest)} more"


def _state(package: Package) -> str:
    if package.version is None:
        return "not installed" if package.required else ""
    return f"{package.version} is installed, {package.wanted} is needed"


def _remedy(package: Package) -> str:
    if package.extra == "npu":
        return "pip install torch-npu on a machine with CANN"
    wanted = f'"qcompile[{package.extra}]"' if package.extra else package.name
    return f"pip install {wanted}"
