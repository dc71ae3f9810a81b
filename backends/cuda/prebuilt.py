"""Build the kernels of a plan where there is no device.

Comes in: a plan for a CUDA device, or cases. Goes out: a folder in the form of Triton's cache.
Always holds: a process with the device compiles none of these kernels again when TRITON_CACHE_DIR
names the folder and its Triton is of the same version: what is looked for there is a hash of the
kernel's source, its constants, the device's architecture and the compiler.

``qcompile.json`` in the folder says what was built.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from qcompile.backends.cuda.ahead import compiling
from qcompile.backends.cuda.shipped import ROWS, Case, ExpertsCase, Launch, RowsCase
from qcompile.backends.cuda.triton_embedding import TritonEmbedding
from qcompile.backends.cuda.triton_experts import TritonExperts
from qcompile.backends.cuda.triton_linear import TritonLinear
from qcompile.cache import cache_folder
from qcompile.plans import Entry, Plan
from qcompile.site import ExpertsSite, LinearSite
from qcompile.spec import AffineSpec, ExpertsSpec, LookupSpec, ScaledSpec, Spec

MANIFEST = "qcompile.json"


def build_plan(plan: Plan, arch: str, folder: Path | None = None) -> Path:
    """Build what the sites of a plan launch, for every height of a tile.

    Args:
        plan: its kernels; sites without one, or with one of another package, need nothing.
        arch: for instance ``sm90``.
        folder: where to; the cache folder's ``triton`` by default.
    """
    return build(arch, cases_of(plan), folder)


def cases_of(plan: Plan) -> Iterator[Launch]:
    """The launches of a plan, each once."""
    seen = set()
    for entry in plan.entries:
        for case in _cases(entry):
            key = str(case), case.spec, case.shape
            if key not in seen:
                seen.add(key)
                yield case


def _cases(entry: Entry) -> Iterator[Launch]:
    kernel, route = entry.kernel, entry.route
    if isinstance(kernel, TritonExperts) and route is not None:
        yield from _experts_cases(entry, kernel, route.spec)
    if not isinstance(kernel, (TritonLinear, TritonEmbedding)) or route is None:
        return
    spec, shape = route.spec, entry.site.weight.shape
    assert isinstance(spec, (AffineSpec, LookupSpec, ScaledSpec))
    if isinstance(kernel, TritonEmbedding):
        yield RowsCase(str(spec), spec, shape, True, kernel.dtype)
        return
    bias = isinstance(entry.site, LinearSite) and entry.site.bias
    yield from (Case(str(spec), spec, shape, rows, kernel.dtype, bias) for rows in ROWS)
    yield RowsCase(str(spec), spec, shape, False, kernel.dtype)


def _experts_cases(entry: Entry, kernel: TritonExperts, spec: Spec) -> Iterator[ExpertsCase]:
    """One for every power of two of choices, which have every height and every number of parts."""
    site = entry.site
    assert isinstance(site, ExpertsSite)
    assert isinstance(spec, ExpertsSpec)
    # Headers do not tell what is between the products: most models have this.
    chosen = site.activation or "gated silu"
    most, choices = site.weight.shape[0] * max(ROWS), 1
    while choices <= most:
        facts = (str(spec), spec, site.weight.shape, choices, kernel.dtype, site.bias, chosen)
        yield ExpertsCase(*facts)
        choices *= 2


def build(arch: str, cases: Iterable[Launch], folder: Path | None = None) -> Path:
    """Compile cases into a folder, and say in it what it holds."""
    import triton

    where = cache_folder("triton") if folder is None else folder
    kernels: list[dict[str, Any]] = []
    for case in cases:
        with compiling(arch, where) as binaries:
            case.launch(arch)
        for binary in binaries:
            kernels.append({"case": str(case), "name": binary.name, "shared": binary.shared})
    content = {"arch": arch, "triton": triton.__version__, "kernels": kernels}
    (where / MANIFEST).write_text(json.dumps(content, indent=1) + "\n")
    return where
