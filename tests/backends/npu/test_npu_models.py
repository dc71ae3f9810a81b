"""Small models on the Ascend backend: plans, lowered graphs, results under emulation."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from support.folders import compiled, exact, pair, rows
from support.pack_awq import Awq, awq
from support.pack_compressed import Compressed, int_quantized, pack_quantized
from support.pack_gptq import Gptq, gptq
from support.packers import Packed, write_folder
from support.small import exact_copy, write_module
from support.zoo import relative_l2
from torch import nn

import qcompile
from qcompile.errors import LowerError, OptionError, PlanError

DEVICE = "npu:910b"
SIZES = ((64, 256), (32, 64))


def model(layers: dict[str, Packed], bias: bool = True) -> nn.Sequential:
    """Linears of the packed layers' sizes, in order."""
    torch.manual_seed(0)
    shapes = [layer.exact.shape for layer in layers.values()]
    return nn.Sequential(*(nn.Linear(k, n, bias=bias) for n, k in shapes))


def check(folder: Path, layers: dict[str, Packed], arch: str = DEVICE, brain: bool = False) -> Any:
    """Compile a folder for a device and compare with the exact model, in two or three ways."""
    write_folder(folder, layers)
    bias = "bias" in next(iter(layers.values())).tensors
    x = rows(next(iter(layers.values())).exact.shape[1])
    expected = exact(model(layers, bias), dict(layers))(x)
    settings: dict[str, Any] = {"device": arch, "emulate": True}
    modes = [(torch.float16, 3e-3), (torch.bfloat16, 2e-2)]
    for dtype, bound in modes if brain else modes[:1]:
        made = compiled(folder, model(layers, bias), dtype=dtype, **settings)
        found = made(x.to(dtype))
        assert found.dtype == dtype
        assert relative_l2(found, expected) < bound
    wide = compiled(folder, model(layers, bias), **{**settings, "emulate": "float32"})
    assert relative_l2(wide(x), expected) < 1e-3
    return made


def pairs(make: Any, what: Any) -> dict[str, Packed]:
    return {str(i): make(n, k, what) for i, (n, k) in enumerate(SIZES)}


def kernels(made: Any) -> list[str]:
    return [entry.runs_as for entry in made.qcompile.plan.entries]


# **** faults that users of other systems reported ****


@pytest.mark.parametrize("group", [32, 64, 128, 256, -1])
@pytest.mark.parametrize("sym", [True, False])
def test_b103_groups_of_any_multiple_of_32(tmp_path: Path, group: int, sym: bool) -> None:
    """256 is refused elsewhere at run time; K and -1 are handed on as they are."""
    size = (64, 512) if group == 256 else (64, 256)
    layers = {"0": gptq(*size, Gptq(4, group, sym=sym, bias=True))}
    made = check(tmp_path / "gptq", layers)
    by_channel = group == -1
    assert kernels(made) == ["npu.linear_int4_t" if by_channel else "npu.linear_int4"]


@pytest.mark.parametrize(("bits", "order"), [(2, "trivial"), (4, "permuted")])
@pytest.mark.parametrize("sym", [True, False])
def test_groups_of_16_are_doubled(tmp_path: Path, bits: int, order: Any, sym: bool) -> None:
    layers = {"0": gptq(64, 256, Gptq(bits, 16, sym=sym, order=order, bias=True))}
    made = check(tmp_path / "gptq", layers, brain=True)
    assert kernels(made) == ["npu.linear_int4x2"]


def test_what_cannot_be_doubled_goes_by_policy(tmp_path: Path) -> None:
    layers = {"0": gptq(64, 256, Gptq(8, 16, sym=True, bias=True))}
    with pytest.raises(PlanError, match="multiple of 32"):
        check(tmp_path / "gptq", layers)


@pytest.mark.parametrize(("bits", "sym"), itertools.product((2, 3, 4, 8), (True, False)))
def test_every_width_of_gptq(tmp_path: Path, bits: int, sym: bool) -> None:
    """Asymmetric zero points with the right sign; three bits across words; v1's minus one."""
    made = check(tmp_path / "gptq", pairs(gptq, Gptq(bits, 32, sym=sym, bias=True)), brain=bits < 4)
    assert kernels(made) == [f"npu.linear_int{8 if bits == 8 else 4}"] * 2


@pytest.mark.parametrize("group", [32, 128])
def test_act_order(tmp_path: Path, group: int) -> None:
    layers = {"0": gptq(64, 256, Gptq(4, group, sym=False, order="permuted", bias=True))}
    made = check(tmp_path / "gptq", layers)
    assert kernels(made) == ["npu.linear_int4"]


def test_awq(tmp_path: Path) -> None:
    made = check(tmp_path / "awq", pairs(awq, Awq(32, bias=True)), brain=True)
    [first, _] = made.qcompile.plan.entries
    assert [edge.name for edge in first.route.edges] == ["awq -> npu.int4.kn.bfloat16"]


def test_b105_eight_bits_by_groups_go_out_as_int8(tmp_path: Path) -> None:
    made = check(tmp_path / "ct", pairs(pack_quantized, Compressed(8, 32, True, bias=True)))
    assert kernels(made) == ["npu.linear_int8"] * 2


def test_b105_an_asymmetric_weight_passes_its_offset(tmp_path: Path) -> None:
    made = check(tmp_path / "ct", pairs(pack_quantized, Compressed(4, 32, False, bias=True)))
    [first, _] = made.qcompile.plan.entries
    assert "offset" in made.qcompile.packed(first).parts


def test_b107_w8a8_takes_float32_scales_whatever_the_activations(tmp_path: Path) -> None:
    what = Compressed(8, -1, True, scale="BF16", bias=True, activations=True)
    layers = pairs(int_quantized, what)
    write_folder(tmp_path / "ct", layers)
    expected = exact(model(layers), dict(layers))(rows(256))
    for dtype in (torch.float16, torch.bfloat16):
        made = compiled(tmp_path / "ct", model(layers), device=DEVICE, dtype=dtype, emulate=True)
        assert kernels(made) == ["npu.linear_w8a8"] * 2
        [first, _] = made.qcompile.plan.entries
        assert made.qcompile.packed(first).parts["scale"].dtype == torch.float32
        found = made(rows(256).to(dtype))
        assert found.dtype == dtype
        assert relative_l2(found, expected) < 2e-2


def test_the_310p_takes_channels_of_int8(tmp_path: Path) -> None:
    made = check(
        tmp_path / "ct", pairs(int_quantized, Compressed(8, -1, True, bias=True)), "npu:310p"
    )
    assert kernels(made) == ["npu.linear_int8_t"] * 2
    layers = pairs(gptq, Gptq(4, 32, bias=True))
    write_folder(tmp_path / "gptq", layers)
    with pytest.raises(PlanError, match=r"the 310P takes scales per channel only"):
        compiled(
            tmp_path / "gptq", model(layers), device="npu:310p", dtype=torch.float16, emulate=True
        )
    rounded = compiled(
        tmp_path / "gptq",
        model(layers),
        device="npu:310p",
        dtype=torch.float16,
        emulate=True,
        on_unsupported="requantize",
    )
    assert kernels(rounded) == ["npu.linear_int8_t, requantized"] * 2
    with pytest.raises(PlanError, match=r"x is bfloat16 on 310p"):
        compiled(
            tmp_path / "gptq", model(layers), device="npu:310p", dtype=torch.bfloat16, emulate=True
        )


# **** graphs ****


class Tied(nn.Module):
    """An embedding and a head that share a weight with more rows than a product takes."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, 32)
        self.head = nn.Linear(32, rows, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.embed(ids))
        return found


@pytest.mark.parametrize(("count", "calls"), [(1000, 1), (65535, 1), (65544, 2), (140000, 3)])
def test_outputs_beyond_65535_run_in_pieces(tmp_path: Path, count: int, calls: int) -> None:
    path = write_module(tmp_path / "tied.gguf", Tied(count), {}, "Q8_0")
    expected = exact_copy(path, Tied(count))
    made = compiled(path, Tied(count), device=DEVICE, dtype=torch.float16, emulate=True)
    ids = torch.tensor([[0, count - 1, 65535 % count], [5, 6, 7]])
    assert relative_l2(made(ids), expected(ids)) < 2e-3
    plan = made.qcompile.plan
    assert kernels(made) == ["npu.embedding_int8", "npu.linear_int8_t"]
    assert len({entry.layout for entry in plan.entries}) == 1
    assert (f"in {calls} runs of outputs" in plan.explain("head")) == (calls > 1)
    assert plan.bytes_after == made.qcompile.packed(plan.entries[0]).nbytes


def test_empty_inputs_and_every_shape(tmp_path: Path) -> None:
    layers = pairs(gptq, Gptq(4, 32, sym=False, bias=True))
    write_folder(tmp_path / "gptq", layers)
    made = compiled(
        tmp_path / "gptq", model(layers), device=DEVICE, dtype=torch.float16, emulate=True
    )
    expected = exact(model(layers), dict(layers))
    for shape in ((5, 256), (256,), (2, 3, 256), (1, 1, 256), (0, 256), (2, 0, 256), (7, 256)):
        x = torch.randn(shape)
        found = made(x.half())
        assert found.shape == (*shape[:-1], 32)
        if found.numel():
            assert relative_l2(found, expected(x)) < 3e-3


@pytest.mark.parametrize("scheme", ["rtn", "gptq"])
def test_a_float_model_is_quantized_for_the_device(scheme: str) -> None:
    options: dict[str, Any] = {"calibration": [rows()]} if scheme == "gptq" else {}
    for extra in ({"bits": 4, "group_size": 32, "sym": False}, {"bits": 8, "group_size": -1}):
        torch._dynamo.reset()
        settings: dict[str, Any] = {**options, **extra}
        on_cpu: Any = qcompile.optimize(pair(), scheme=scheme, emitter="eager", **settings)
        made: Any = qcompile.optimize(
            pair(), scheme=scheme, device=DEVICE, emulate="float32", **settings
        )
        assert "emulated on the CPU" in str(made.qcompile.plan)
        assert relative_l2(made(rows()), on_cpu(rows())) < 1e-3


# **** without a device ****


def test_nothing_runs_without_a_device_unless_asked(tmp_path: Path) -> None:
    layers = pairs(gptq, Gptq(4, 32, bias=True))
    write_folder(tmp_path / "gptq", layers)
    made: Any = qcompile.optimize(
        model(layers), checkpoint=tmp_path / "gptq", device=DEVICE, dtype=torch.float16
    )
    assert made.qcompile.plan.emulation == ""
    made.qcompile.pack_all(made.qcompile.plan.entries)
    with pytest.raises(LowerError, match=r"no Ascend device[\s\S]*emulate=True"):
        made(rows(256).half())


def test_what_the_arguments_mean(tmp_path: Path) -> None:
    layers = pairs(gptq, Gptq(4, 32, bias=True))
    write_folder(tmp_path / "gptq", layers)
    plan = qcompile.plan(tmp_path / "gptq", device="npu")
    assert plan.entries[0].layout == "npu.int4.kn.bfloat16"
    plan = qcompile.plan(tmp_path / "gptq", device=DEVICE, dtype=torch.float16)
    assert plan.entries[0].layout == "npu.int4.kn.float16"
    assert qcompile.plan(tmp_path / "gptq", device="npu:310p").refused
    with pytest.raises(PlanError, match="x is float32 on 910b"):
        compiled(tmp_path / "gptq", model(layers), device=DEVICE, emulate=True)
    with pytest.raises(OptionError, match=r"emulate='half'[\s\S]*'float32'"):
        compiled(tmp_path / "gptq", model(layers), device=DEVICE, emulate="half")
    with pytest.raises(OptionError, match="cpu has no emulator"):
        compiled(tmp_path / "gptq", model(layers), emulate=True)
