"""The device a model is compiled for, present or not.

Comes in: a string such as ``cpu``, ``cpu:avx2``, ``cuda:sm90``, ``npu:910b``. Goes out: a frozen
record. Always holds: parsing and planning touch no device; only a backend's ``probe.py`` does.
Backends of other packages bring kinds of their own, and judge what they call architectures.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import entry_points

from qcompile.errors import OptionError, nearest

ARCHITECTURES: dict[str, tuple[str, ...]] = {
    "cpu": ("generic", "avx2", "avx512", "avx512_vnni", "amx", "neon"),
    "cuda": ("sm75", "sm80", "sm86", "sm89", "sm90", "sm100", "sm120"),
    "npu": ("910b", "910_93", "310p"),
}


@dataclass(frozen=True)
class Target:
    """A kind of device and one of its architectures.

    Attributes:
        kind: ``cpu``, ``cuda``, ``npu``, or what an installed package brings: the backend's name.
        arch: an architecture of that kind, or None for what a present device turns out to be.
    """

    kind: str
    arch: str | None = None

    @staticmethod
    def parse(text: str) -> Target:
        """Read ``kind`` or ``kind:arch``.

        Raises:
            OptionError: the kind or the architecture is unknown.
        """
        if not isinstance(text, str):
            raise OptionError(
                f"device={text!r}",
                f"a {type(text).__name__}",
                "a text such as 'cpu' or 'cuda:sm90'",
                f"pass device={str(text)!r}",
            )
        kind, colon, arch = text.partition(":")
        if kind not in ARCHITECTURES:
            known = (*ARCHITECTURES, *_installed())
            if kind in known:
                return Target(kind, arch or None)
            raise OptionError(
                f"device {text!r}",
                f"unknown kind of device {kind!r}",
                f"one of {', '.join(known)}, optionally with ':' and an architecture",
                f"name a known device{nearest(kind, known)}",
            )
        if colon and arch not in ARCHITECTURES[kind]:
            raise OptionError(
                f"device {text!r}",
                f"unknown {kind} architecture {arch!r}",
                f"one of {', '.join(ARCHITECTURES[kind])}",
                f"name a known architecture{nearest(arch, ARCHITECTURES[kind])}",
            )
        return Target(kind, arch or None)

    def __str__(self) -> str:
        return f"{self.kind}:{self.arch}" if self.arch else self.kind


def _installed() -> list[str]:
    """Kinds of device that other packages bring."""
    return sorted(entry.name for entry in entry_points(group="qcompile.backends"))
