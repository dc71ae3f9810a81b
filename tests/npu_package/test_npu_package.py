"""Every call that lowering emits, through the C++ host code of the real torch_npu package.

``.ci/npu`` makes the environment and runs these; elsewhere they are skipped. The package checks
arguments, makes results, picks the device's operator and hands it memory; the pretended device then
checks the rules again on what it is given, and computes with the backend's emulator.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

if os.environ.get("QC_FAKE_NPU") != "1" or importlib.util.find_spec("torch_npu") is None:
    pytest.skip("needs torch_npu over a pretended device: run .ci/npu", allow_module_level=True)

from support.folders import exact, rows
from support.lowered import emulate, emulated_call
from support.pack_compressed import Compressed, int_quantized
from support.pack_gptq import Gptq, gptq
from support.packers import Packed, write_folder
from support.weights import random_weight
from support.zoo import ZOO, folder_entries, relative_l2

import qcompile
from npu_package.device import LOG, install
from npu_package.handlers import handlers
from qcompile import backends
from qcompile.backends import npu
from qcompile.backends.npu import nibbles
from qcompile.backends.npu.emulation import Mode
from qcompile.backends.npu.layouts import DTYPES, ORDERS
from qcompile.backends.npu.schemas import SCHEMAS, VERSION
from qcompile.edge import find_route
from qcompile.errors import LowerError
from qcompile.kernel import Kernel
from qcompile.spec import AffineForm, AffineSpec

install(handlers(Mode("910b")))
backends.load("npu").prepare()
OPS = torch.ops.npu
HALF = torch.float16
FORMS: tuple[AffineForm, ...] = ("symmetric", "zero", "offset")
CONTRACTS = {"aclnnWeightQuantBatchMatmulV2", "aclnnQuantMatmulV5", "aclnnDynamicQuantV2"}


@pytest.fixture(autouse=True)
def log() -> None:
    LOG.calls.clear()
    LOG.error = None
    torch._dynamo.reset()


def away(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("npu")


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
    weight = random_weight(AffineSpec(bits, group, form, torch.float16), 48, 136)
    assert kernel.layout is not None
    route = find_route("affine", weight.spec, kernel.layout)
    if route is None:
        assert bits == 8
        assert "int4" in kernel.layout
        return
    packed = route.apply(weight)
    inputs: list[tuple[torch.Tensor, Any]] = []
    if kernel.kind == "embedding":
        inputs = [(torch.tensor([[0, 47, 3], [5, 5, 5]]), dtype)]
    else:
        bias = torch.randn(48).to(dtype)
        inputs = [
            (torch.randn(5, 136).to(dtype), bias),
            (torch.randn(2, 3, 136).to(dtype), None),
            (torch.randn(136).to(dtype), bias),
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


def test_the_packer_drops_a_third_dimension_without_a_word() -> None:
    """Why the rule for it is ours, and why packing is done by edges."""
    values = torch.randint(-8, 8, (2, 16, 24), dtype=torch.int32)
    assert OPS.npu_convert_weight_to_int4pack(away(values)).shape == (16, 3)


# **** models ****


def zoo() -> list[tuple[str, Path]]:
    from support.zoo import entries

    found = {**entries("gguf", "dense"), **entries("gguf", "moe"), **folder_entries()}
    return [
        (name, entry.path) for name, entry in sorted(found.items()) if not entry.facts.get("part")
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "path"), zoo(), ids=[name for name, _ in zoo()])
def test_every_site_of_every_checkpoint(name: str, path: Path, dtype: torch.dtype) -> None:
    # Floats of experts would run in torch, with operators that the device does not pretend.
    policy: Any = "requantize" if name == "moe-gguf-q4_k_m" else "dequantize"
    made = qcompile.load(path, device="npu", dtype=dtype, verify=True, on_unsupported=policy)[0]
    session: Any = made.qcompile
    assert str(session.plan.target) == "npu:910b"
    assert session.device.type == "npu"
    assert len(session.verification) == len(session.plan.entries)
    packed = [entry for entry in session.plan.entries if not entry.dequantize]
    linears = [entry for entry in packed if entry.site.kind == "linear"]
    assert LOG.calls.count("aclnnWeightQuantBatchMatmulV2") == len(linears)
    experts = [entry for entry in packed if entry.site.kind == "experts"]
    assert LOG.calls.count("aclnnMoeFinalizeRoutingV2") == len(experts)


def test_the_zoo_is_here() -> None:
    assert len(zoo()) == (24 if ZOO.exists() else 2)


@pytest.mark.parametrize("emitter", ["eager", "torchair", "npugraph_ex", "npugraphs"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_model_on_the_device(tmp_path: Path, emitter: str, dtype: torch.dtype) -> None:
    layers: dict[str, Packed] = {
        "0": gptq(64, 256, Gptq(4, 32, sym=False, order="permuted", bias=True)),
        "1": gptq(32, 64, Gptq(4, 32, bias=True)),
    }
    write_folder(tmp_path / "gptq", layers)

    def fresh() -> nn.Sequential:
        return nn.Sequential(nn.Linear(256, 64), nn.Linear(64, 32))

    made: Any = qcompile.optimize(
        fresh(), checkpoint=tmp_path / "gptq", device="npu", dtype=dtype, emitter=emitter
    )
    assert all(parameter.device.type == "npu" for parameter in made.parameters())
    expected = exact(fresh(), dict(layers))
    for shape in ((5, 256), (2, 3, 256), (7, 256), (5, 256)):
        x = torch.randn(shape)
        found = made(away(x.to(dtype)))
        assert found.device.type == "npu"
        assert relative_l2(found.cpu(), expected(x)) < (3e-3 if dtype == HALF else 2e-2)
    assert "aclnnWeightQuantBatchMatmulV2" in LOG.calls


def test_int8_activations_on_the_device(tmp_path: Path) -> None:
    what = Compressed(8, -1, True, scale="BF16", bias=True, activations=True)
    layers: dict[str, Packed] = {"0": int_quantized(64, 256, what)}
    write_folder(tmp_path / "ct", layers)
    for dtype in DTYPES:
        made: Any = qcompile.optimize(
            nn.Sequential(nn.Linear(256, 64)),
            checkpoint=tmp_path / "ct",
            device="npu",
            dtype=dtype,
            verify=True,
        )
        found = made(away(rows(256).to(dtype)))
        expected = exact(nn.Sequential(nn.Linear(256, 64)), dict(layers))(rows(256))
        assert relative_l2(found.cpu(), expected) < 2e-2
    assert {"aclnnDynamicQuantV2", "aclnnQuantMatmulV5"} <= set(LOG.calls)


@pytest.mark.parametrize(
    ("name", "arch"),
    [("Ascend910B3", "910b"), ("Ascend910_9391", "910_93"), ("Ascend310P3", "310p")],
)
def test_devices_are_told_apart(name: str, arch: str) -> None:
    code = "from qcompile.backends import npu; print(npu.default_target(), npu.device())"
    environment = {**os.environ, "QC_FAKE_SOC": name}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[-2:] == [f"npu:{arch}", "npu"]
