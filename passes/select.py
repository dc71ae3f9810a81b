"""Choose a kernel for every site.

Comes in: sites, the target's kernels, a policy. Goes out: a ``Plan``.
Always holds: sites that share a weight get kernels that want the same layout, so that one packed
copy serves all of them; a site that nothing accepts is left to the policy, never to chance.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from qcompile.edge import Route, find_route
from qcompile.errors import PlanError
from qcompile.kernel import Accept, Kernel
from qcompile.passes.weights.requantize import candidates
from qcompile.plan_text import mib, refusals
from qcompile.plans import Entry, Plan, Verdict
from qcompile.site import Site
from qcompile.target import Target

Policy = Literal["error", "dequantize", "requantize"]


@dataclass(frozen=True)
class _Offer:
    kernel: Kernel
    route: Route
    cost: float


def select(
    sites: Iterable[Site],
    kernels: Sequence[Kernel],
    target: Target,
    policy: Policy = "error",
    dtype: torch.dtype = torch.float32,
) -> tuple[Entry, ...]:
    """Decide every site.

    Args:
        sites: in model order; sites that share a weight carry the same weight name.
        kernels: the target's kernels.
        target: the device.
        policy: what becomes of a site without a kernel: ``error`` leaves its entry without one
            (``require_kernels`` raises), ``dequantize`` runs it as a float op, ``requantize``
            rounds its weight to 8 bits for a kernel that takes those.
        dtype: dtype of weights, or of their scales, that the policy makes.
    """
    sites = list(sites)
    by_weight: dict[str, list[Site]] = {}
    for site in sites:
        by_weight.setdefault(site.weight.name, []).append(site)
    decided: dict[int, Entry] = {}
    for sharing in by_weight.values():
        entries = _decide(sharing, kernels, target)
        if policy == "requantize" and entries[0].kernel is None:
            entries = _requantize(entries, kernels, target, dtype)
        for site, entry in zip(sharing, entries, strict=True):
            decided[id(site)] = _by_policy(entry, policy, dtype)
    return tuple(decided[id(site)] for site in sites)


def require_kernels(plan: Plan) -> None:
    """Raise PlanError when a site of the plan has no kernel and the policy is ``error``."""
    refused = plan.refused
    if not refused:
        return
    first = refused[0]
    size = sum(_float_bytes(entry.site, torch.float32) for entry in refused)
    raise PlanError(
        f"{first.site.name} ({plan.source})",
        f"no kernel for {len(refused)} of {len(plan.entries)} sites on {plan.target}",
        f"a kernel that accepts {first.site.kind} sites of spec {first.site.weight.spec}",
        f'on_unsupported="dequantize" (up to {mib(size)} of float32 weights), '
        'on_unsupported="requantize" (to 8 bits, where kernels take those) or device="cpu"',
        reasons=refusals(refused, plan.target),
    )


def _decide(sites: Sequence[Site], kernels: Sequence[Kernel], target: Target) -> list[Entry]:
    offers: list[dict[str, _Offer]] = []
    verdicts: list[tuple[Verdict, ...]] = []
    for site in sites:
        offer, verdict = _ask(site, kernels, target)
        offers.append(offer)
        verdicts.append(verdict)
    layout = _cheapest_common(offers)
    chosen = [None if layout is None else offer[layout] for offer in offers]
    return [
        Entry(site, verdict, pick.kernel if pick else None, pick.route if pick else None)
        for site, verdict, pick in zip(sites, verdicts, chosen, strict=True)
    ]


def _ask(
    site: Site, kernels: Sequence[Kernel], target: Target
) -> tuple[dict[str, _Offer], tuple[Verdict, ...]]:
    """The cheapest offer for each layout, and what every kernel said."""
    offers: dict[str, _Offer] = {}
    verdicts = []
    for kernel in kernels:
        if kernel.kind != site.kind:
            continue
        verdict, offer = _ask_one(site, kernel, target)
        verdicts.append(verdict)
        if offer is None:
            continue
        layout = kernel.layout or site.weight.layout
        if layout not in offers or offer.cost < offers[layout].cost:
            offers[layout] = offer
    return offers, tuple(verdicts)


def _ask_one(site: Site, kernel: Kernel, target: Target) -> tuple[Verdict, _Offer | None]:
    weight = site.weight
    route: Route | None = Route((), weight.spec)
    if kernel.layout is not None:
        route = find_route(weight.layout, weight.spec, kernel.layout)
    if route is None:
        text = f"no edge leads from {weight.layout} ({weight.spec}) to {kernel.layout}"
        return Verdict(kernel.name, None, text), None
    # The kernel judges the weight as it would get it, at the end of the route.
    routed = replace(weight, spec=route.spec, layout=kernel.layout or weight.layout)
    answer = kernel.accepts(replace(site, weight=routed), target)
    if not isinstance(answer, Accept):
        return Verdict(kernel.name, None, answer.reason), None
    return Verdict(kernel.name, answer.cost, answer.note), _Offer(kernel, route, answer.cost)


def _cheapest_common(offers: Sequence[dict[str, _Offer]]) -> str | None:
    """The layout that every site has an offer for, with the smallest sum of costs."""
    common = set.intersection(*(set(offer) for offer in offers))
    if not common:
        return None
    return min(sorted(common), key=lambda layout: sum(offer[layout].cost for offer in offers))


def _requantize(
    entries: list[Entry], kernels: Sequence[Kernel], target: Target, dtype: torch.dtype
) -> list[Entry]:
    """The entries of a weight's sites on the weight rounded to 8 bits, where kernels take that."""
    weight = entries[0].site.weight
    for rounded, edge in candidates(weight, dtype):
        sites = [replace(entry.site, weight=rounded) for entry in entries]
        decided = _decide(sites, kernels, target)
        if decided[0].kernel is not None:
            start = Route((), weight.spec).then(edge, rounded.spec)
            pairs = [(old, new, new.route) for old, new in zip(entries, decided, strict=True)]
            return [
                replace(old, kernel=new.kernel, route=start.joined(route), requantized=True)
                for old, new, route in pairs
                if route is not None
            ]
    return entries


def _by_policy(entry: Entry, policy: Policy, dtype: torch.dtype) -> Entry:
    if entry.kernel is not None or policy != "dequantize":
        return entry
    return replace(entry, dequantize=True, float_bytes=_float_bytes(entry.site, dtype))


def _float_bytes(site: Site, dtype: torch.dtype) -> int:
    size = dtype.itemsize
    for extent in site.weight.shape:
        size *= extent
    return size
