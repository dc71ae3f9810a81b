"""Compare every site's kernel with the reference on the stored bytes.

Comes in: a session with a complete plan. Goes out: one measured error for each site, worst first.
Always holds: the reference decodes the checkpoint's own bytes, so that edges, packing, kernel and
binding are all under test; a site beyond its kernel's declared tolerance is an error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import fx

from qcompile import ops
from qcompile.errors import VerifyError
from qcompile.layout import QuantizedTensor
from qcompile.passes.lower import Lower
from qcompile.plans import Entry
from qcompile.program import Program
from qcompile.session import Session
from qcompile.weight import WeightRef

_ROWS = 3  # activations for a linear, looked-up rows for an embedding
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
    given = _input(entry, session.dtype)
    expected = _reference(entry.site.weight, entry, given, session.dtype)
    found = _compiled(entry, session, given)
    scale = expected.float().norm().item()
    difference = (found.float() - expected.float()).norm().item()
    allowed = entry.kernel.tolerance.relative_l2 if entry.kernel else _DEQUANTIZED
    # A sum rounded to the activation's dtype differs by one unit of it at most.
    allowed += torch.finfo(session.dtype).eps
    return SiteError(
        entry.site.name, entry.runs_as, difference / scale if scale else difference, allowed
    )


def _input(entry: Entry, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    rows, columns = entry.site.weight.shape
    if entry.site.kind == "embedding":
        return torch.randint(0, rows, (_ROWS,), generator=generator)
    return torch.randn(_ROWS, columns, generator=generator).to(dtype)


def _reference(
    weight: WeightRef, entry: Entry, given: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    meaning = ops.encode_meaning(QuantizedTensor(weight.spec, weight.layout, weight.shape, {}))
    parts = list(weight.load().parts.values())
    if entry.site.kind == "embedding":
        out = ops.embedding(given, parts, meaning, dtype)
    else:
        out = ops.linear(given, parts, meaning, None)
    weight.release()
    return out  # type: ignore[no-any-return]


def _compiled(entry: Entry, session: Session, given: torch.Tensor) -> torch.Tensor:
    weight = entry.site.weight
    program = Program(fx.GraphModule(torch.nn.Module(), fx.Graph()))
    x = program.graph.placeholder("x")
    meaning = ops.encode_meaning(QuantizedTensor(weight.spec, weight.layout, weight.shape, {}))
    parts = program.add_handle(weight)
    if entry.site.kind == "embedding":
        node = program.graph.call_function(ops.embedding, (x, parts, meaning, session.dtype))
    else:
        node = program.graph.call_function(ops.linear, (x, parts, meaning, None))
    node.meta.update(qc_weight=weight.name, qc_site=entry.site.name)
    program.graph.output(node)
    Lower({(entry.site.kind, weight.name): entry}, session.packed).run(program)
    program.graph_module.recompile()
    return program.graph_module(given)  # type: ignore[no-any-return]
