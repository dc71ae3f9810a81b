"""Marlin kernels, weights in their layouts, and what they say of a site."""

from __future__ import annotations

from dataclasses import replace

import torch

from qcompile.backends.cuda.marlin import MarlinLinear
from qcompile.backends.cuda.marlin_layout import ORDERS
from qcompile.edge import find_route
from qcompile.kernel import Accept, Reject
from qcompile.layout import QuantizedTensor
from qcompile.site import LinearSite
from qcompile.spec import AffineSpec
from qcompile.target import Target
from support.weights import random_weight, reference

TARGET = Target("cuda", "sm90")


def kernel(bits: int, dtype: torch.dtype) -> MarlinLinear:
    [order] = [one for one in ORDERS if one.bits == bits and one.dtype == dtype]
    return MarlinLinear(order, dtype)


def packed(one: MarlinLinear, weight: QuantizedTensor) -> QuantizedTensor:
    route = find_route("affine", weight.spec, one.order.name)
    assert route is not None
    return route.apply(weight)


def answer(
    one: MarlinLinear, spec: AffineSpec, n: int = 128, k: int = 256, target: Target = TARGET
) -> Accept | Reject:
    route = find_route("affine", spec, one.order.name)
    assert route is not None
    ref = reference(random_weight(spec, n, k))
    routed = replace(ref, spec=route.spec, layout=one.order.name)
    return one.accepts(LinearSite("proj", routed, True), target)
