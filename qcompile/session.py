"""What all graphs of one compiled model share.

Comes in: a catalogue, a target and a policy. Goes out: decisions and packed weights.
Always holds: a weight is packed once for each layout, whatever number of graphs (prefill, decode,
recompiles) uses it; the session does not keep the model alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from qcompile.backends import Backend, Emulates, Places, kernels_for
from qcompile.capture import Names
from qcompile.experts_layout import dequantized_experts
from qcompile.kernel import Kernel
from qcompile.layout import QuantizedTensor
from qcompile.observe import log
from qcompile.passes.select import Policy, require_kernels, select
from qcompile.passes.weights.pack import pack
from qcompile.passes.weights.requantize import measure
from qcompile.plans import Entry, Plan
from qcompile.program import CANONICAL, Program, has_bias, weight_name
from qcompile.site import EmbeddingSite, ExpertsSite, LinearSite, Site, SiteKey, key_of
from qcompile.spec import ExpertsSpec, FloatSpec
from qcompile.weight import WeightRef

if TYPE_CHECKING:
    from qcompile.verify import SiteError

Progress = Callable[[str, int, int], None]
Emulation = bool | Literal["float32"]


def no_progress(what: str, done: int, total: int) -> None:
    """Report nothing."""


@dataclass
class Session:
    """One compiled model.

    Attributes:
        catalogue: weights by canonical parameter name.
        backend: the backend of the plan's target.
        plan: decisions, made before the first graph; sites that only a graph shows are added.
        names: canonical parameter names by identity.
        dtype: dtype of the activations.
        policy: what becomes of a site without a kernel.
        progress: called with a weight's name, bytes done and bytes in all while packing.
        bind_floats: whether graphs must take float weights from the catalogue, because the model
            still holds others.
        compiles: graphs compiled so far.
        verification: measured errors of the sites, when the user asked for them.
        emulate: whether graphs run on the CPU with the device's operators emulated; ``float32``
            does so without the device's rounding.
        operands: dtype of activations that weights are packed for; ``dtype`` when None.
    """

    catalogue: Mapping[str, WeightRef]
    backend: Backend
    plan: Plan
    names: Names
    dtype: torch.dtype
    policy: Policy = "error"
    progress: Progress = no_progress
    bind_floats: bool = False
    compiles: int = 0
    verification: tuple[SiteError, ...] = ()
    emulate: Emulation = False
    operands: torch.dtype | None = None
    _packed: dict[tuple[str, str], QuantizedTensor] = field(default_factory=dict)

    def entries(self) -> dict[SiteKey, Entry]:
        """The plan's entries by what tells the uses of one weight apart."""
        return {key_of(e.site): e for e in self.plan.entries}

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels that sites are offered to."""
        return kernels_for(self.backend, self.operands or self.dtype, self.plan.numerics)

    @property
    def device(self) -> torch.device:
        """Where the weights are when graphs run."""
        if isinstance(self.backend, Places) and not self.emulate:
            return self.backend.device()
        return torch.device("cpu")

    def runnable(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A lowered graph as it can be called here: itself, or under emulation."""
        if not self.emulate:
            return call
        assert isinstance(self.backend, Emulates)
        return self.backend.emulated(call, self.plan.target, self.emulate == "float32")

    def extend_plan(self, program: Program) -> None:
        """Plan the sites of a graph that the plan does not know yet."""
        known = self.entries()
        fresh = [s for s in sites_of(program) if key_of(s) not in known]
        if not fresh:
            return
        names = {site.weight.name for site in fresh}
        again = [e.site for e in self.plan.entries if e.site.weight.name in names]
        keep = [e for e in self.plan.entries if e.site.weight.name not in names]
        dtype = self.operands or self.dtype
        new = select([*again, *fresh], self.kernels, self.plan.target, self.policy, dtype)
        self.plan = replace(self.plan, entries=(*keep, *new))
        require_kernels(self.plan)

    def packed(self, entry: Entry) -> QuantizedTensor:
        """The weight of an entry in its kernel's layout; packed on first use."""
        weight = entry.site.weight
        key = (weight.name, entry.layout)
        if key not in self._packed:
            log("weights", f"{weight.source} -> {entry.layout} {entry.bytes_after:,} bytes")
            packed = self._transform(entry)
            if entry.requantized:
                self.plan = self.plan.measured(weight.name, measure(weight, packed))
            self._packed[key] = packed.to(self.device)
        return self._packed[key]

    def _transform(self, entry: Entry) -> QuantizedTensor:
        weight = entry.site.weight
        if entry.dequantize and isinstance(weight.spec, ExpertsSpec):
            return dequantized_experts(weight, self.dtype)
        if entry.dequantize or entry.route is None:
            data = self.float_weight(weight, self.dtype)
            return QuantizedTensor(FloatSpec(self.dtype), "float", weight.shape, {"data": data})
        return pack(weight, entry.route)

    def float_weight(self, weight: WeightRef, dtype: torch.dtype) -> torch.Tensor:
        """A weight as floats, for a use that is no site; one object for each dtype."""
        key = (weight.name, str(dtype))
        if key not in self._packed:
            data = weight.dequantize().to(dtype).to(self.device)
            weight.release()
            spec = FloatSpec(dtype)
            self._packed[key] = QuantizedTensor(spec, "float", weight.shape, {"data": data})
        return self._packed[key].parts["data"]

    def pack_all(self, entries: Iterable[Entry]) -> None:
        """Pack the weights of the entries, reporting progress in stored bytes."""
        todo = {(e.site.weight.name, e.layout): e for e in entries}
        todo = {key: e for key, e in todo.items() if key not in self._packed}
        total, done = sum(e.site.weight.nbytes for e in todo.values()), 0
        for entry in todo.values():
            self.progress(entry.site.weight.name, done, total)
            self.packed(entry)
            done += entry.site.weight.nbytes
        if todo:
            self.progress("", total, total)


def sites_of(program: Program) -> list[Site]:
    """The sites of a program's canonical ops, in graph order."""
    sites: list[Site] = []
    for node in program.canonical_nodes():
        weight = program.handles[weight_name(node)]
        name = str(node.meta.get("qc_site", weight.name))
        kind = CANONICAL[node.target]  # type: ignore[index]
        if kind == "embedding":
            sites.append(EmbeddingSite(name, weight))
        elif kind == "experts":
            sites.append(ExpertsSite(name, weight, has_bias(node), str(node.args[7])))
        else:
            sites.append(LinearSite(name, weight, has_bias(node)))
    return sites
