"""Compare every site's kernel with the reference on the stored bytes.

Comes in: a session with a complete plan. Goes out: one measured error for each site, worst first.
Always holds: the reference decodes the checkpoint's own bytes, so that edges, packing, kernel and
binding are all under test; a site beyond its kernel's declared tolerance is an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from qcompile import ops
from qcompile.errors import VerifyError
from qcompile.layout import QuantizedTensor
from qcompile.ops_experts import experts
from qcompile.passes.lower import Lower
from qcompile.plans import Entry
from qcompile.program import Program
from qcompile.session import Session
from qcompile.site import EmbeddingSite, LinearSite, key_of
from qcompile.spec import ExpertsSpec
from qcompile.weight import WeightRef

_ROWS = 3  # activations for a linear and for experts, looked-up rows for an embedding
_TOP = 2  # experts chosen for a row
_DEQUANTIZED = 1e-2  # a float op in the activation's dtype; bfloat16 rounds to 2**-8


@dataclass(frozen=True)
class SiteError:
    """The measured error of one site.

    Attributes:
        site: module path.
        kernel: what ran it.
        relative_l2: ``|y - reference| / |reference|``.
        allowed: what the kernel declares.
    """

    site: str
    kernel: str
    relative_l2: float
    allowed: float

    def __str__(self) -> str:
        return f"{self.site}  {self.kernel}  {self.relative_l2:.2e} (allowed {self.allowed:.0e})"


def verify_session(session: Session) -> tuple[SiteError, ...]:
    """Measure every site of the plan and remember the result in ``session.verification``.

    Raises:
        VerifyError: some sites are beyond tolerance; the message names the worst.
    """
    session.backend.prepare()
    session.pack_all(session.plan.entries)
    errors = [verify_entry(entry, session) for entry in session.plan.entries]
    errors.sort(key=_badness, reverse=True)
    session.verification = tuple(errors)
    bad = [error for error in errors if not error.relative_l2 <= error.allowed]
    if bad:
        raise VerifyError(
            f"{bad[0].site} ({session.plan.source})",
            f"{len(bad)} of {len(errors)} sites disagree with the reference",
            "errors within what the kernels declare",
            f"report this and name {bad[0].kernel}; another device may be right meanwhile",
            reasons=[str(error) for error in bad[:5]],
        )
    return session.verification


def _badness(error: SiteError) -> float:
    # No number compares as false with every number, which would leave the order to chance.
    if math.isnan(error.relative_l2):
        return math.inf
    return error.relative_l2 / max(error.allowed, 1e-30)


def verify_entry(entry: Entry, session: Session) -> SiteError:
    """Run one site both ways on the same random input and compare."""
    case = _case(entry, session.dtype)
    expected = _reference(entry.site.weight, case)
    found = _compiled(entry, session, case)
    # In float64: squares of huge but legal values leave float32.
    scale = expected.double().norm().item()
    difference = (found.double() - expected.double()).norm().item()
    allowed = entry.kernel.tolerance.relative_l2 if entry.kernel else _DEQUANTIZED
    # What the policy's rounding lost was measured apart; it is the weight's, and the result's.
    rounded = {e.site.weight.name: e.error for e in session.plan.entries if e.requantized}
    allowed += 2 * (rounded.get(entry.site.weight.name) or 0.0)
    # A sum rounded to the activation's dtype differs by one unit of it at most.
    allowed += torch.finfo(session.dtype).eps
    return SiteError(
        entry.site.name, entry.runs_as, difference / scale if scale else difference, allowed
    )


@dataclass(frozen=True)
class _Case:
    """A canonical op's arguments but for the weight: one before it, the others behind."""

    op: Callable[..., Any]
    first: torch.Tensor
    rest: tuple[Any, ...]


def _case(entry: Entry, dtype: torch.dtype) -> _Case:
    site, generator = entry.site, torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    if isinstance(site, EmbeddingSite):
        ids = torch.randint(0, site.weight.shape[0], (_ROWS,), generator=generator)
        return _Case(ops.embedding, ids, (dtype,))
    if isinstance(site, LinearSite):
        rows, columns = site.weight.shape
        return _Case(ops.linear, random(_ROWS, columns), (random(rows) if site.bias else None,))
    count, spec = site.weight.shape[0], site.weight.spec
    assert isinstance(spec, ExpertsSpec)
    *up, down = sorted(spec.roles, key=lambda role: role.role == "down")
    chosen = torch.rand(_ROWS, count, generator=generator).topk(min(_TOP, count))
    biases: list[torch.Tensor | None] = [None, None]
    if site.bias:
        biases = [random(count, sum(role.rows for role in up)), random(count, down.rows)]
    gated = "gated silu" if len(up) == 2 or up[0].role == "gate_up" else "silu"
    x = random(_ROWS, up[0].columns)
    return _Case(experts, x, (chosen.indices, chosen.values, *biases, site.activation or gated))


def _reference(weight: WeightRef, case: _Case) -> torch.Tensor:
    meaning = ops.encode_meaning(QuantizedTensor(weight.spec, weight.layout, weight.shape, {}))
    parts = list(weight.load().parts.values())
    out = case.op(case.first, parts, meaning, *case.rest)
    weight.release()
    return out  # type: ignore[no-any-return]


def _compiled(entry: Entry, session: Session, case: _Case) -> torch.Tensor:
    weight = entry.site.weight
    program = Program(fx.GraphModule(torch.nn.Module(), fx.Graph()))
    graph = program.graph
    x = graph.placeholder("x")
    tensors = [value for value in case.rest if isinstance(value, torch.Tensor)]
    inputs = [graph.placeholder(f"input{i}") for i in range(len(tensors))]
    given = iter(inputs)
    rest = [next(given) if isinstance(v, torch.Tensor) else v for v in case.rest]
    meaning = ops.encode_meaning(QuantizedTensor(weight.spec, weight.layout, weight.shape, {}))
    node = graph.call_function(case.op, (x, program.add_handle(weight), meaning, *rest))
    node.meta.update(qc_weight=weight.name, qc_site=entry.site.name)
    graph.output(node)
    Lower({key_of(entry.site): entry}, session.packed).run(program)
    program.graph_module.recompile()
    device = session.device
    moved = [tensor.to(device) for tensor in (case.first, *tensors)]
    return session.runnable(program.graph_module)(*moved).cpu()  # type: ignore[no-any-return]
