"""The sections of ``qcompile.bench.device``.

Comes in: a run: where, how large, until when. Goes out: rows.
Always holds: what is compared is computed on the same device from the same packed weights; ratios
are of times from one section.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from qcompile.backends.cuda.clock import Runner, clock_rate, measure, properties
from qcompile.bench.formats import random_weight
from qcompile.bench.linear import call_of, pack
from qcompile.edge import find_route
from qcompile.errors import OptionError
from qcompile.kernel import Accept, Kernel
from qcompile.layout import QuantizedTensor
from qcompile.site import LinearSite
from qcompile.spec import AffineSpec, LookupSpec, Spec
from qcompile.weight import WeightRef

_ROTATED = 256 << 20  # bytes: more than the last cache of any device
_F16, _F32 = torch.float16, torch.float32
TIMED = {
    "w4 g128": AffineSpec(4, 128, "symmetric", _F16),
    "q4_k": AffineSpec(4, 32, "offset", _F32),
}
SHAPES = ((8192, 8192), (4096, 14336), (14336, 4096))
ROWS = (1, 2, 4, 8, 16, 32, 64, 256, 1024, 4096)
_FORMS = ("symmetric", "zero", "offset")


@dataclass
class Run:
    """Where and how large.

    Attributes:
        add: keeps a row of a section.
        tiny: whether an interpreter has to manage.
        late: whether time is over.
        limits: bytes and products a second, once they are measured.
    """

    add: Callable[[str, dict[str, Any]], None]
    tiny: bool
    late: Callable[[], bool]
    limits: dict[str, float] = field(default_factory=dict)
    backend: Any = None
    device: torch.device = torch.device("cpu")

    def prepare(self, backend: Any) -> None:
        """Load the kernels. Raises where there is nothing that runs them."""
        self.backend, self.device = backend, backend.device()
        if self.device.type != "cuda" and not self.tiny:
            raise OptionError(
                "python -m qcompile.bench.device",
                "no CUDA device",
                "a machine with one",
                "pass --tiny in a process with TRITON_INTERPRET=1 to try the script itself",
            )
        backend.prepare()
        if self.device.type != "cuda":
            from qcompile.backends.cuda.interpreter import enable_bfloat16

            enable_bfloat16()

    def facts(self) -> dict[str, Any]:
        """The device and versions."""
        found: dict[str, Any] = {"torch": torch.__version__, "device": str(self.device)}
        if self.device.type == "cuda":
            found |= properties(self.device)
        return found

    def kernel(self, name: str, dtype: torch.dtype) -> Kernel | None:
        """The kernel of this name for activations of a dtype."""
        return next((k for k in self.backend.kernels(dtype) if k.name == name), None)

    def copies(self, weight: QuantizedTensor) -> list[QuantizedTensor]:
        """The weight on the device, as often as no cache holds it."""
        count = 1 if self.tiny else max(2, -(-_ROTATED // weight.nbytes))
        here = [weight.to(self.device)]
        for _ in range(count - 1):
            parts = {name: part.clone() for name, part in here[0].parts.items()}
            here.append(QuantizedTensor(weight.spec, weight.layout, weight.shape, parts))
        return here


# **** correctness ****


def correct(run: Run) -> None:
    """Every kind of weight, every height of a tile; twice, for results that change."""
    shapes = ((96, 256),) if run.tiny else ((512, 1024), (1000, 2016))
    rows = (1, 5) if run.tiny else (1, 8, 16, 17, 33, 64, 200, 1100)
    for dtype, spec in itertools.product((torch.bfloat16, torch.float16), _specs(run.tiny)):
        for shape in shapes:
            _correct(run, dtype, spec, shape, rows)
            _looked_up(run, dtype, spec, shape)
        if run.late():
            return


def _specs(tiny: bool) -> Iterator[AffineSpec | LookupSpec]:
    bits = (4,) if tiny else (2, 3, 4, 5, 6, 8)
    for width, form in itertools.product(bits, _FORMS):
        yield AffineSpec(width, 32, form)  # type: ignore[arg-type]
    if not tiny:
        for group in (16, 48, 64, 128, 1 << 20):
            yield AffineSpec(4, group, "zero")
        yield LookupSpec(4, 32, tuple(range(-8, 8)))


def _correct(
    run: Run,
    dtype: torch.dtype,
    spec: AffineSpec | LookupSpec,
    shape: tuple[int, int],
    rows: tuple[int, ...],
) -> None:
    weight = random_weight(spec, *shape)
    exact = weight.dequantize().to(run.device)
    for kernel in _accepting(run, weight, dtype):
        assert kernel.layout is not None
        call = call_of(kernel, packed := pack(weight, kernel.layout))
        parts = [part.to(run.device) for part in packed.parts.values()]
        for count in rows:
            x = torch.randn(count, shape[1], device=run.device).to(dtype)
            y, again = call(x, *parts), call(x, *parts)
            wanted = functional.linear(x.double(), exact.double())
            error = float((y.double() - wanted).norm() / wanted.norm())
            good = error <= kernel.tolerance.relative_l2 and torch.equal(y, again)
            row = {"kernel": kernel.name, "spec": str(spec), "shape": str(shape), "rows": count}
            run.add("correct", {**row, "dtype": str(dtype), "error": error, "ok": good})


def _looked_up(
    run: Run, dtype: torch.dtype, spec: AffineSpec | LookupSpec, shape: tuple[int, int]
) -> None:
    """Rows that ids name, beside the layout's own decoder."""
    kernel = run.kernel("cuda.triton_embedding", dtype)
    if kernel is None or kernel.layout is None:
        return
    packed = pack(random_weight(spec, *shape), kernel.layout)
    ids = torch.tensor([[0, shape[0] - 1], [shape[0] // 2, 0]])
    found = call_of(kernel, packed)(ids.to(run.device), *packed.to(run.device).parts.values())
    wanted = packed.dequantize()[ids]
    error = float((found.cpu().float() - wanted).norm() / wanted.norm())
    row = {"kernel": kernel.name, "spec": str(spec), "shape": str(shape), "rows": ids.numel()}
    run.add("correct", {**row, "dtype": str(dtype), "error": error, "ok": error < 1e-6})


def _accepting(run: Run, weight: QuantizedTensor, dtype: torch.dtype) -> Iterator[Kernel]:
    """The linear kernels that take a weight."""
    for kernel in run.backend.kernels(dtype):
        if kernel.kind != "linear" or kernel.layout is None:
            continue
        route = find_route(weight.layout, weight.spec, kernel.layout)
        if route is None:
            continue
        site = LinearSite("bench", _reference(route.spec, kernel.layout, weight))
        if isinstance(kernel.accepts(site, run.backend.default_target()), Accept):
            yield kernel


def _reference(spec: Spec, layout: str, weight: QuantizedTensor) -> WeightRef:
    def read(rows: object) -> QuantizedTensor:
        return weight

    return WeightRef("bench", spec, layout, weight.shape, read, "memory: bench")


# **** ceilings ****


def ceilings(run: Run) -> None:
    """Bytes a second of a copy, both ways counted, and products a second of cuBLAS."""
    size = 1 << 12 if run.tiny else 1 << 30
    data, other = (torch.empty(size, dtype=torch.uint8, device=run.device) for _ in range(2))
    seconds = measure([lambda: other.copy_(data)], run.device).fastest
    run.limits["bytes"] = 2 * size / seconds
    run.add("ceilings", {"what": "copy", "GB/s": run.limits["bytes"] / 1e9})
    n = 64 if run.tiny else 8192
    for dtype in (torch.float16, torch.bfloat16):
        x, w = (torch.randn(n, n, device=run.device).to(dtype) for _ in range(2))
        runners: list[Runner] = [lambda x=x, w=w: x @ w.t()]  # type: ignore[misc]
        rate = 2 * n**3 / measure(runners, run.device).fastest
        run.limits[str(dtype)] = rate
        run.add("ceilings", {"what": f"product {dtype}", "TFLOP/s": rate / 1e12})


# **** linears ****


def linears(run: Run) -> None:
    """Our kernels, others that are installed, decoding and multiplying, and cuBLAS on floats."""
    shapes = ((96, 256),) if run.tiny else SHAPES
    rows = (1, 5) if run.tiny else ROWS
    for (name, spec), shape in itertools.product(TIMED.items(), shapes):
        weight = random_weight(spec, *shape)
        floats = _floats(run, shape)
        weights = {}
        for kernel in _accepting(run, weight, torch.float16):
            assert kernel.layout is not None
            packed = pack(weight, kernel.layout)
            weights[kernel.name] = (call_of(kernel, packed), run.copies(packed))
        for count in rows:
            if run.late():
                return
            x = torch.randn(count, shape[1], device=run.device).to(_F16)
            base = measure([_product(x, one) for one in floats], run.device).fastest
            row = {"spec": name, "shape": str(shape), "rows": count, "cuBLAS us": base * 1e6}
            for kernel_name, (call, copies) in weights.items():
                bound = [_bound(call, x, one) for one in copies]
                seconds = measure(bound, run.device).fastest
                run.add(
                    "linear",
                    {
                        **row,
                        "kernel": kernel_name,
                        "us": seconds * 1e6,
                        "GB/s": copies[0].nbytes / seconds / 1e9,
                        "ratio": base / seconds,
                    },
                )


def _floats(run: Run, shape: tuple[int, int]) -> list[torch.Tensor]:
    size = shape[0] * shape[1] * 2
    count = 1 if run.tiny else max(2, -(-_ROTATED // size))
    return [torch.randn(*shape, device=run.device).to(_F16) for _ in range(count)]


def _product(x: torch.Tensor, weight: torch.Tensor) -> Runner:
    return lambda: functional.linear(x, weight)


def _bound(call: Callable[..., torch.Tensor], x: torch.Tensor, weight: QuantizedTensor) -> Runner:
    parts = tuple(weight.parts.values())
    return lambda: call(x, *parts)


# **** predicted ****


def predicted(run: Run) -> None:
    """What memory and issue slots allow, beside the time of one row; needs the compiler."""
    if run.device.type != "cuda":
        return
    from qcompile.backends.cuda import aot
    from qcompile.backends.cuda.shipped import Case

    facts, arch = run.facts(), str(run.backend.default_target().arch)
    clock = clock_rate(run.device)
    slots = facts["multiprocessors"] * 4 * 32 * clock
    for name, spec in TIMED.items():
        for count, shape in itertools.product((1, 16), SHAPES):
            row = aot.compiled(Case(name, spec, shape, count, _F16, False), arch)
            kernel = run.kernel("cuda.triton_linear", _F16)
            assert kernel is not None
            assert kernel.layout is not None
            packed = pack(random_weight(spec, *shape), kernel.layout)
            x = torch.randn(count, shape[1], device=run.device).to(_F16)
            call, copies = call_of(kernel, packed), run.copies(packed)
            seconds = measure([_bound(call, x, one) for one in copies], run.device).fastest
            memory = packed.nbytes / run.limits["bytes"]
            issue = row.per_weight * shape[0] * shape[1] / slots
            cells = {"memory us": memory * 1e6, "issue us": issue * 1e6, "us": seconds * 1e6}
            share = max(memory, issue) / seconds
            run.add(
                "predicted",
                {"spec": name, "shape": str(shape), "rows": count, **cells, "share": share},
            )


# **** experts ****


def mixtures(run: Run) -> None:
    """A layer of Qwen3-30B-A3B by every kernel that takes it."""
    from qcompile.bench import device_experts

    device_experts.mixtures(run)
