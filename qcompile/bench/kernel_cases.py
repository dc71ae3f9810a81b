"""What the kernels' benchmark runs: which kernels, on which weights.

Comes in: options, or a checkpoint. Goes out: kernels' names and cases.
Always holds: a checkpoint's headers are enough; a weight that no format describes is told.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import qcompile
from qcompile import backends
from qcompile.backends import HasFast
from qcompile.bench.formats import names
from qcompile.errors import OptionError, nearest
from qcompile.kernel import NUMERICS, Kernel
from qcompile.spec import BlockSpec, Spec

FORMATS = (
    "4-bit g32", "4-bit g128", "q4_k", "q5_0", "q6_k", "q8_0", "8-bit row", "fp8 row",
    "nf4 g64", "iq4_nl", "mxfp4", "2-bit g64", "3-bit g128",
)  # fmt: skip
SHAPES = ((4096, 14336), (14336, 4096))
ROWS = (1, 8, 64, 512)
QUICK_FORMATS, QUICK_SHAPES, QUICK_ROWS = ("4-bit g128", "q4_k"), ((2048, 4096),), (1, 8, 64)
KINDS = ("linear", "embedding")
_EMBEDDING, _SMALL = (262144, 640), (32768, 640)


# The reference, and what runs where there is no compiler: timed where they are asked for.
_STAND_INS = ("reference.", "cpu.aten_", "cpu.decoded_")


@dataclass(frozen=True)
class Case:
    """A weight ``[n, k]`` of a format, at a site of a kind."""

    kind: str
    format: str
    n: int
    k: int

    def __str__(self) -> str:
        kind = "" if self.kind == "linear" else f"{self.kind} "
        return f"{kind}{self.format} {self.n} x {self.k}"


def kernels_of(kind: str) -> tuple[Kernel, ...]:
    """All kernels of a backend, those of the numerics ``fast`` last."""
    backend = backends.load(kind)
    return (*backend.KERNELS, *(backend.FAST_KERNELS if isinstance(backend, HasFast) else ()))


def chosen(kind: str, only: tuple[str, ...], numerics: tuple[str, ...]) -> tuple[Kernel, ...]:
    """The kernels to time.

    Args:
        kind: of target.
        only: names; empty for what plans choose first, by numerics.
        numerics: some of ``exact`` and ``fast``.

    Raises:
        OptionError: a name is not one of a linear or embedding kernel, or numerics are unknown.
    """
    for name in numerics:
        if name not in NUMERICS:
            raise OptionError(
                f"--numerics {name}",
                "unknown",
                f"some of {', '.join(NUMERICS)}, separated by commas",
                f"correct the option{nearest(name, NUMERICS)}",
            )
    known = {kernel.name: kernel for kernel in kernels_of(kind) if kernel.kind in KINDS}
    for name in only:
        if name not in known:
            raise OptionError(
                f"--kernel {name}",
                "unknown",
                f"some of {', '.join(known)}; experts are measured by qcompile bench experts",
                f"name a known kernel{nearest(name, known)}",
            )
    if only:
        return tuple(known[name] for name in only)
    backend = backends.load(kind)
    fast = backend.FAST_KERNELS if isinstance(backend, HasFast) else ()
    listed = (
        *(backend.KERNELS if "exact" in numerics else ()),
        *(fast if "fast" in numerics else ()),
    )
    return tuple(k for k in listed if k.kind in KINDS and not k.name.startswith(_STAND_INS))


def cases(
    kernels: tuple[Kernel, ...],
    formats: tuple[str, ...],
    shapes: tuple[tuple[int, int], ...],
    quick: bool = False,
) -> list[Case]:
    """Every format and shape for the linears, and one table for the embeddings."""
    kinds = {kernel.kind for kernel in kernels}
    made = []
    if "linear" in kinds:
        made += [Case("linear", format, n, k) for n, k in shapes for format in formats]
    if "embedding" in kinds:
        made.append(Case("embedding", "q8_0", *(_SMALL if quick else _EMBEDDING)))
    return made


def cases_of_file(file: str, device: str) -> tuple[list[Case], list[str]]:
    """The distinct weights of a checkpoint's sites, and what no format describes."""
    if not Path(file).exists():
        raise OptionError(
            file, "no such file or folder", "a model's folder or file", "check the path"
        )
    found: dict[Case, None] = {}
    left: dict[str, None] = {}
    for entry in qcompile.plan(file, device=device).entries:
        weight, kind = entry.site.weight, entry.site.kind
        name = format_of(weight.spec)
        if kind not in KINDS or len(weight.shape) != 2 or name is None:
            left[f"{kind} {weight.spec}"] = None
            continue
        found[Case(kind, name, *weight.shape)] = None
    return list(found), list(left)


def format_of(spec: Spec) -> str | None:
    """The format's name of a spec; None where there is none."""
    if isinstance(spec, BlockSpec):
        return spec.type
    text = str(spec)
    parsed = text.startswith("uint") and text.split()[2:] in (["symmetric"], ["zero"], ["offset"])
    return text if parsed or text in names() else None
