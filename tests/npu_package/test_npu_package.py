"""Every call that lowering emits, through the C++ host code of the real torch_npu package.

``.ci/npu`` makes the environment and runs these; elsewhere they are skipped. The package checks
arguments, makes results, picks the device's operator and hands it memory; the pretended device then
checks the rules again on what it is given, and computes with the backend's emulator.
"""

from __future__ import annotations

import itertools
import re
import sys
from typing import Any

import pytest
import torch
from support.lowered import emulate, emulated_call, relative
from support.npu_mutations import MUTATIONS, right_graph
from support.weights import random_weight
from torch._subclasses.fake_tensor import FakeTensorMode

from npu_package.device import LOG
from npu_package.ready import OPS, away, log  # noqa: F401 - a fixture
from qcompile.backends import npu
from qcompile.backends.npu import nibbles
from qcompile.backends.npu.layouts import DTYPES, ORDERS
from qcompile.backends.npu.schemas import SCHEMAS, VERSION
from qcompile.edge import find_route
from qcompile.errors import LowerError
from qcompile.kernel import Kernel
from qcompile.layout import QuantizedTensor
from qcompile.spec import AffineForm, AffineSpec, LookupSpec

HALF = torch.float16
FORMS: tuple[AffineForm, ...] = ("symmetric", "zero", "offset")
CONTRACTS = {"aclnnWeightQuantBatchMatmulV2", "aclnnQuantMatmulV5", "aclnnDynamicQuantV2"}


# **** data ****


def test_schemas_are_the_packages() -> None:
    package: Any = sys.modules["torch_npu"]
    assert package.__version__.split("+")[0] == VERSION
    found = {str(schema) for schema in torch._C._jit_get_all_schemas()}
    for name, schema in SCHEMAS.items():
        assert f"npu::{schema}" in found, name


@pytest.mark.parametrize(("size", "columns"), [(8, 8), (40, 96), (3, 128)])
def test_the_packages_packer_is_ours(size: int, columns: int) -> None:
    values = torch.randint(-8, 8, (size, columns), dtype=torch.int32)
    found = OPS.npu_convert_weight_to_int4pack(away(values)).cpu()
    assert torch.equal(found, nibbles.pack(values.to(torch.int8)))


@pytest.mark.parametrize("order", [o for o in ORDERS if o.bits == 4], ids=lambda o: o.name)
def test_edges_pack_as_the_package_does(order: Any) -> None:
    weight = random_weight(AffineSpec(4, 32, "zero", order.dtype), 40, 96)
    route = find_route("affine", weight.spec, order.name)
    assert route is not None
    signed = weight.parts["codes"].to(torch.int32) - 8
    turned = signed if order.rows_first else signed.t().contiguous()
    found = OPS.npu_convert_weight_to_int4pack(away(turned)).cpu()
    assert torch.equal(found, route.apply(weight).parts["weight"])


# **** calls ****


def kernels() -> list[Kernel]:
    """Those for matrices; experts are run by the checkpoints below."""
    found = [kernel for dtype in DTYPES for kernel in npu.kernels(dtype)]
    return [kernel for kernel in found if kernel.kind != "experts"]


def shapes_of(found: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    return found.shape, found.dtype


@pytest.mark.parametrize("kernel", kernels(), ids=lambda k: f"{k.name}-{k.layout}")
@pytest.mark.parametrize(
    ("bits", "group", "form"), itertools.product((3, 4, 8), (32, 64, 4096), FORMS)
)
def test_the_package_takes_every_call(
    kernel: Kernel, bits: int, group: int, form: AffineForm
) -> None:
    dtype = torch.bfloat16 if str(kernel.layout).endswith("bfloat16") else HALF
    if kernel.name == "npu.linear_w8a8" and (form != "symmetric" or group < 4096):
        return
    if "int4x2" in kernel.name:
        return  # below
    weight = random_weight(AffineSpec(bits, group, form, torch.float16), 48, 136)
    assert kernel.layout is not None
    route = find_route("affine", weight.spec, kernel.layout)
    if route is None:
        assert bits == 8
        assert "int4" in kernel.layout
        return
    takes(kernel, route.apply(weight), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "spec",
    [
        AffineSpec(6, 16, "symmetric"),
        AffineSpec(2, 16, "offset"),
        AffineSpec(4, 48, "zero"),
        LookupSpec(4, 16, (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)),
    ],
    ids=str,
)
def test_the_package_takes_doubled_groups(
    spec: AffineSpec | LookupSpec, dtype: torch.dtype
) -> None:
    weight = random_weight(spec, 48, 144)
    for kernel in npu.kernels(dtype):
        if "int4x2" in kernel.name:
            assert kernel.layout is not None
            route = find_route(weight.layout, spec, kernel.layout)
            assert route is not None
            takes(kernel, route.apply(weight), dtype)


def takes(kernel: Kernel, packed: QuantizedTensor, dtype: torch.dtype) -> None:
    """The package takes the calls, makes what the emulator makes, and tells the shape before."""
    LOG.calls.clear()
    inputs: list[tuple[torch.Tensor, Any]] = []
    if kernel.kind == "embedding":
        inputs = [(torch.tensor([[0, 47, 3], [5, 5, 5]]), dtype)]
    else:
        bias, k = torch.randn(48).to(dtype), packed.shape[1]
        inputs = [
            (torch.randn(5, k).to(dtype), bias),
            (torch.randn(2, 3, k).to(dtype), None),
            (torch.randn(k).to(dtype), bias),
        ]
    for x, rest in inputs:
        on_cpu = emulate(kernel, packed, x, rest)
        graph = emulated_call(kernel, packed, rest).to("npu")
        found = graph(away(x))
        assert found.device.type == "npu"
        assert torch.equal(found.cpu(), on_cpu)
        assert (set(LOG.calls) & CONTRACTS != set()) == (kernel.kind == "linear")
        # The package's meta functions, which its graph compilers trace with.
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = graph(mode.from_tensor(away(x)))
        assert shapes_of(fake) == shapes_of(on_cpu)


def right() -> dict[str, Any]:
    values = torch.randint(-8, 8, (256, 64), dtype=torch.int8)
    return {
        "x": torch.randn(5, 256).half(),
        "weight": nibbles.pack(values),
        "antiquant_scale": torch.rand(2, 64).half(),
        "antiquant_offset": torch.randint(-8, 9, (2, 64)).half(),
        "antiquant_group_size": 128,
    }


def call(**arguments: Any) -> torch.Tensor:
    moved = {k: away(v) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    found: torch.Tensor = OPS.npu_weight_quant_batchmatmul(**moved)
    return found


@pytest.mark.parametrize("group", [-1, 16, 48, 100, 256])
def test_a_wrong_group_is_refused_by_the_package_itself(group: int) -> None:
    with pytest.raises(RuntimeError, match="antiquant_group_size"):
        call(**{**right(), "antiquant_group_size": group})
    assert LOG.error is None


def test_what_the_package_lets_through_is_refused_by_the_rules() -> None:
    """On a device these are its host code's errors, or results without sense."""
    given = right()
    turned = nibbles.pack(nibbles.unpack(given["weight"]).t().contiguous())
    cases: list[tuple[dict[str, Any], str]] = [
        ({"x": given["x"][None]}, "two dimensions"),
        ({"x": given["x"][:0]}, "empty tensors"),
        ({"antiquant_offset": given["antiquant_offset"][:1].contiguous()}, "shape of scale"),
        ({"antiquant_group_size": 64}, "scale must be"),
        ({"bias": torch.zeros(64)}, "bias is float32"),
    ]
    call(**given)
    for change, says in cases:
        with pytest.raises(RuntimeError, match="161002"):
            call(**{**given, **change})
        assert isinstance(LOG.error, LowerError)
        assert says in str(LOG.error)
    # A view is made on the device, because a copy to it makes a tensor contiguous.
    moved = {k: away(v) if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    with pytest.raises(RuntimeError, match="161002"):
        OPS.npu_weight_quant_batchmatmul(**{**moved, "weight": away(turned).t()})
    assert "transposed exactly when weight is" in str(LOG.error)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_emission_is_caught_here_too(name: str) -> None:
    mutation = MUTATIONS[name]
    graph, x, expected, bound = right_graph(mutation.kind)
    graph = graph.to("npu")
    assert relative(graph(away(x)).cpu(), expected) <= bound
    mutation.apply(graph)
    graph.recompile()
    # A device does not know where indices come from: there the wrong mode shows in the result.
    if mutation.says is None or "drop_pad_mode" in mutation.says:
        assert relative(graph(away(x)).cpu(), expected) > 100 * bound
        return
    with pytest.raises(RuntimeError):
        graph(away(x))
    # The package itself refuses some; the others its host code hands on, and the rules refuse.
    assert LOG.error is None or re.search(mutation.says, str(LOG.error))


def test_the_packer_drops_a_third_dimension_without_a_word() -> None:
    """Why the rule for it is ours, and why packing is done by edges."""
    values = torch.randint(-8, 8, (2, 16, 24), dtype=torch.int32)
    assert OPS.npu_convert_weight_to_int4pack(away(values)).shape == (16, 3)
