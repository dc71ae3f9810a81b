"""The operators as graphs hold them: traced, compiled, gathered, looked up; models end to end."""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest
import torch
from support.interpreted import strict
from support.lowered import emulated_call, relative
from support.weights import random_weight
from torch import nn

import qcompile
from qcompile.backends import cuda, load
from qcompile.backends.cuda import launch
from qcompile.backends.cuda.coding import E2M1_TWICE, coding_of
from qcompile.backends.cuda.jit.rows import rows
from qcompile.backends.cuda.layouts import DTYPES, layout_name
from qcompile.edge import find_route
from qcompile.kernel import Kernel
from qcompile.layout import QuantizedTensor
from qcompile.ops import encode_meaning
from qcompile.spec import AffineSpec, LookupSpec, ScaledSpec

load("cuda").prepare()
OPS: Any = torch.ops.qcompile
Spec = AffineSpec | LookupSpec | ScaledSpec
# Both kinds of words, every kind of value, a K that fills no block.
SPECS: tuple[Spec, ...] = (
    AffineSpec(2, 16, "offset"),
    AffineSpec(3, 32, "zero"),
    AffineSpec(4, 208, "symmetric"),
    AffineSpec(5, 32, "offset"),
    AffineSpec(6, 16, "symmetric"),
    AffineSpec(8, 48, "zero"),
    LookupSpec(4, 32, tuple(range(-8, 8))),
    LookupSpec(4, 16, E2M1_TWICE),
    ScaledSpec(torch.float8_e4m3fn, 208),
)


def packed(spec: Spec, n: int, k: int, dtype: torch.dtype) -> QuantizedTensor:
    weight = random_weight(spec, n, k)
    route = find_route(weight.layout, spec, layout_name(dtype))
    assert route is not None
    return route.apply(weight)


def kernel_named(name: str, dtype: torch.dtype) -> Kernel:
    return next(kernel for kernel in cuda.kernels(dtype) if kernel.name == name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_looked_up_rows_are_the_decoded_weight_rounded_once(spec: Spec, dtype: torch.dtype) -> None:
    weight = packed(spec, 50, 208, dtype)
    ids = torch.tensor([[0, 49, 7], [7, 25, 48]])
    arguments = (list(weight.parts.values()), encode_meaning(weight))
    for index in (ids, ids.int(), ids.t()):
        for wanted in (dtype, torch.float32):
            with strict(rows):
                found = OPS.triton_embedding(index, *arguments, wanted)
            assert torch.equal(found, weight.dequantize()[index.long()].to(wanted))
    assert OPS.triton_embedding(ids[:0], *arguments, dtype).shape == (0, 3, 208)
    with pytest.raises(IndexError, match=r"outside 0\.\.49"):
        OPS.triton_embedding(torch.tensor([50]), *arguments, dtype)


def test_rows_that_do_not_exist_are_no_numbers() -> None:
    """What a device gives, where raising would mean to wait for it."""
    weight = packed(AffineSpec(4, 32, "zero"), 50, 96, torch.float16)
    coding = coding_of(weight.spec, 96)
    assert not isinstance(coding, str)
    ids = torch.tensor([3, 50, -1])
    with strict(rows):
        found = launch.rows(weight.parts, coding, (50, 96), ids, torch.float16, asm=False)
    assert torch.equal(found[0], weight.dequantize()[3].half())
    assert found[1:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operators_are_what_compilers_expect(dtype: torch.dtype) -> None:
    weight = packed(AffineSpec(4, 32, "zero"), 48, 64, dtype)
    parts, meaning = list(weight.parts.values()), encode_meaning(weight)
    x, bias, ids = torch.randn(3, 64).to(dtype), torch.randn(48).to(dtype), torch.tensor([[3, 7]])
    torch.library.opcheck(OPS.triton_linear.default, (x, parts, meaning, bias))
    torch.library.opcheck(OPS.triton_embedding.default, (ids, parts, meaning, dtype))

    def both(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        rows = OPS.triton_embedding(ids, parts, meaning, dtype)
        y: torch.Tensor = OPS.triton_linear(torch.relu(x) + rows.sum((0, 1)), parts, meaning, bias)
        return y * 2

    compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, ids), both(x, ids))

    class Module(nn.Module):
        def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            return both(x, ids)

    exported = torch.export.export(Module(), (x, ids))
    assert torch.equal(exported.module()(x, ids), both(x, ids))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_permuted_columns_meet_a_permuted_input(dtype: torch.dtype) -> None:
    spec = AffineSpec(4, 32, "zero", dtype, "permuted")
    weight = random_weight(spec, 40, 112)
    order = torch.randperm(112, generator=torch.Generator().manual_seed(1))
    g_idx = (torch.arange(112) // 32)[order].to(torch.int32)
    weight = QuantizedTensor(spec, "affine", (40, 112), {**weight.parts, "g_idx": g_idx})
    route = find_route("affine", spec, layout_name(dtype))
    assert route is not None
    stored = route.apply(weight)
    assert torch.equal(stored.dequantize(), weight.dequantize())
    x, bias = torch.randn(2, 3, 112).to(dtype), torch.randn(40).to(dtype)
    call = emulated_call(kernel_named("cuda.triton_linear", dtype), stored, bias)
    expected = x.double() @ weight.dequantize().double().T + bias.double()
    assert relative(call(x), expected) < {torch.float16: 6e-4, torch.bfloat16: 4e-3}[dtype]


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(60, 64)
        self.first = nn.Linear(64, 96)
        self.second = nn.Linear(96, 64, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(torch.relu(self.first(self.embed(ids))))
        return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [4, 8])
def test_a_model_compiled_for_a_device_that_is_not_here(bits: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    # Rounded first, so that both dtypes of activations get the same codes.
    plain = Small().to(dtype).float().requires_grad_(False)
    ids = torch.randint(0, 60, (2, 5))
    options: Any = {"scheme": "rtn", "bits": bits, "group_size": 32, "emulate": True}
    model = qcompile.optimize(
        copy.deepcopy(plain).to(dtype), device="cuda:sm90", dtype=dtype, verify=True, **options
    )
    found = model(ids)
    assert found.dtype == dtype
    plan = str(cast(Any, model).qcompile.plan)
    assert "cuda.triton_linear" in plan
    assert "Triton's interpreter" in plan
    options["emulate"] = "float32"
    wide = qcompile.optimize(copy.deepcopy(plain), device="cuda:sm90", **options)
    assert relative(found, wide(ids)) < {torch.float16: 2e-3, torch.bfloat16: 1.5e-2}[dtype]
    assert relative(wide(ids), plain(ids)) < (0.2 if bits == 4 else 0.02)
