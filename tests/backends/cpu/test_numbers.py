"""Numbers of 16 bits are converted as torch converts them.

Three columns at most: longer runs go through the processor's own instructions, where it has them.
"""

from __future__ import annotations

import pytest
import torch

from qcompile import backends
from qcompile.backends.cpu.panel import NAME, arguments
from qcompile.edge import find_route
from qcompile.layout import QuantizedTensor
from qcompile.spec import AffineSpec

backends.load("cpu").prepare()
DTYPES = (torch.float16, torch.bfloat16)


def panel(values: torch.Tensor, columns: int) -> QuantizedTensor:
    """A weight whose row ``i`` is ``values[i]`` (float32) in every column."""
    spec = AffineSpec(2, 8, "symmetric", torch.float32)
    codes = torch.full((len(values), columns), 3, dtype=torch.uint8)
    parts = {"codes": codes, "scale": values[:, None]}
    route = find_route("affine", spec, NAME)
    assert route is not None
    return route.apply(QuantizedTensor(spec, "affine", (len(values), columns), parts))


def equal(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Bit for bit, but for the payload of what is not a number."""
    same = found.view(torch.int16) == expected.view(torch.int16)
    return bool((same | (found.isnan() & expected.isnan())).all())


def floats() -> torch.Tensor:
    """Every half, its neighbours in float32, the points halfway to the next half, and others."""
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    bits = halves.view(torch.int32)
    near = [(bits + step).view(torch.float32) for step in (-1, 0, 1, 0xFFF, 0x1000, 0x1001)]
    anything = torch.randint(-(1 << 31), 1 << 31, (1 << 18,), dtype=torch.int64)
    tiny = torch.rand(1 << 16) * 2.0**-23
    ends = torch.tensor([65503.9, 65504.0, 65519.99, 65520.0, 65536.0, 2.0**-25, 2.0**-24, 0.0])
    return torch.cat([*near, anything.to(torch.int32).view(torch.float32), tiny, ends, -ends])


@pytest.mark.parametrize("dtype", DTYPES)
def test_floats_are_rounded_to_the_nearest(dtype: torch.dtype) -> None:
    values = floats()
    weight = panel(values, 3)
    blob, table = weight.parts["blob"], weight.parts["table"]
    found = torch.ops.qcompile_cpu.panel_embedding(
        torch.arange(len(values)), blob, table, arguments(weight.spec, weight.shape), dtype
    )
    assert equal(found, values[:, None].expand(-1, 3).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_of_16_bits_is_read(dtype: torch.dtype) -> None:
    weight = panel(torch.ones(1), 1)
    blob, table = weight.parts["blob"], weight.parts["table"]
    call, shape = torch.ops.qcompile_cpu.panel_linear, arguments(weight.spec, weight.shape)
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)[:, None]
    found = torch.cat([call(x, blob, table, None, shape, 0) for x in every.split(1)])
    expected = every.clone()
    expected[every.isinf()] = float("nan")  # a row that holds an infinity is no number
    # The least of bfloat16 are rounded to multiples of the least normal number.
    tiny = every.abs().float() < 2.0**-112
    assert float((found[tiny].float() - every[tiny].float()).abs().max()) <= 2.0**-127
    # A sum begins with 0, and 0 + -0 is 0.
    assert equal(found[~tiny], torch.where(every == 0, 0, expected)[~tiny])
