"""Rows decoded from panels are the weight's rows, bit for bit."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.weights import random_weight

from qcompile import backends
from qcompile.backends.cpu.panel import NAME, arguments
from qcompile.edge import find_route
from qcompile.layout import QuantizedTensor
from qcompile.spec import AffineSpec, LookupSpec

backends.load("cpu").prepare()
SPECS = (
    *(
        AffineSpec(bits, group, form, torch.float16 if bits % 2 else torch.float32)  # type: ignore[arg-type]
        for bits, (group, form) in itertools.product(
            range(1, 9), ((32, "symmetric"), (20, "zero"), (999, "offset"))
        )
    ),
    LookupSpec(4, 32, tuple(range(-128, 128, 16)), torch.float16),
    LookupSpec(1, 12, (-1, 1)),
)


def rows(weight: QuantizedTensor, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    route = find_route(weight.layout, weight.spec, NAME)
    assert route is not None
    packed = route.apply(weight)
    call, parts = torch.ops.qcompile_cpu.panel_embedding, packed.parts
    shape = arguments(packed.spec, packed.shape)
    return call(ids, parts["blob"], parts["table"], shape, dtype)  # type: ignore[no-any-return]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_rows_are_equal(spec: AffineSpec | LookupSpec) -> None:
    weight = random_weight(spec, 37, 203)
    exact, ids = weight.dequantize(), torch.arange(37).flip(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(rows(weight, ids, dtype), exact[ids].to(dtype))


@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 0, 3), (3, 2, 70)])
def test_ids_of_any_shape(shape: tuple[int, ...]) -> None:
    weight = random_weight(AffineSpec(8, 32, "symmetric", torch.float16), 48, 64)
    ids = torch.randint(0, 48, shape)
    for given in (ids, ids.int(), ids.expand(2, *shape), ids.t() if ids.dim() == 2 else ids):
        found = rows(weight, given, torch.float32)
        assert torch.equal(found, weight.dequantize()[given.long()])


def test_what_it_refuses() -> None:
    weight = random_weight(AffineSpec(8, 32, "symmetric", torch.float16), 48, 64)
    for bad in (-1, 48):
        with pytest.raises(RuntimeError, match=rf"id {bad} is outside 0\.\.47"):
            rows(weight, torch.tensor([0, bad]), torch.float32)
    with pytest.raises(RuntimeError, match="int32 or int64"):
        rows(weight, torch.tensor([0.0]), torch.float32)
