"""Reported faults of shapes and edges, run through whole compiled modules: B37 to B47."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.folders import BOUND, agrees, compiled, exact, right_or_refused, rows
from support.pack_awq import Awq, awq
from support.pack_compressed import Compressed, int_quantized, pack_quantized
from support.pack_gptq import Gptq, gptq
from support.packers import Packed, write_folder
from support.zoo import relative_l2
from torch import nn
from transformers.pytorch_utils import Conv1D

import qcompile

Make = Callable[[], nn.Module]


def linear(n: int, k: int, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(k, n, bias=bias))


# **** B37: a short last group ****


@pytest.mark.parametrize(("k", "group"), [(192, 128), (4304, 32), (96, 64)])
@pytest.mark.parametrize("scheme", ["gptq", "pack"])
def test_b37_a_short_last_group(tmp_path: Path, scheme: str, k: int, group: int) -> None:
    if scheme == "gptq":
        layer = gptq(16, k, Gptq(4, group, bias=True))
        assert layer.tensors["scales"].shape == (-(-k // group), 16)
    else:
        layer = pack_quantized(16, k, Compressed(4, group, symmetric=False, bias=True))
    folder = write_folder(tmp_path / "model", {"0": layer})
    agrees(folder, lambda: linear(16, k), {"0": layer}, rows(k))


# **** B39: N that fills no tile ****


@pytest.mark.parametrize("n", [1, 7, 32, 96, 160])
def test_b39_rows_that_fill_no_tile(tmp_path: Path, n: int) -> None:
    """Padding never shows, whatever the device: the sites have the size of the module."""
    layer = gptq(n, 256, Gptq(4, 128, bias=True))
    folder = write_folder(tmp_path / "model", {"0": layer})
    model = agrees(folder, lambda: linear(n, 256), {"0": layer}, rows(256, 9))
    assert model(rows(256, 9)).shape == (9, n)
    for device in ("cpu", "cuda:sm80", "cuda:sm90", "npu:910b"):
        plan = qcompile.plan(linear(n, 256), device, checkpoint=folder, on_unsupported="dequantize")
        assert plan.explain("0")
        assert not plan.refused


# **** B41: one group ****


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_b41_one_group_for_all_columns(tmp_path: Path, bits: int) -> None:
    """-1 is the same as a group of all columns; indices of zeros are right here."""
    layer = gptq(32, 64, Gptq(bits, -1, order="zeros", bias=True))
    assert layer.tensors["scales"].shape == (1, 32)
    assert not layer.tensors["g_idx"].any()
    same = layer.with_config(group_size=64)
    for name, given in {"one": layer, "all": same, "none": layer.without("g_idx")}.items():
        folder = write_folder(tmp_path / name, {"0": given})
        assert torch.equal(qcompile.open(folder).dequantize("0.weight"), layer.exact)
    agrees(tmp_path / "one", lambda: linear(32, 64), {"0": layer}, rows())


def test_b41_columns_in_order_with_one_group(tmp_path: Path) -> None:
    layer = gptq(32, 64, Gptq(4, -1, bias=True)).with_config(desc_act=True)
    folder = write_folder(tmp_path / "model", {"0": layer})
    agrees(folder, lambda: linear(32, 64), {"0": layer}, rows())


# **** B43: more rows than an index holds ****


def test_b43_a_million_rows(tmp_path: Path) -> None:
    layer = gptq(64, 64, Gptq(4, 32, bias=True))
    folder = write_folder(tmp_path / "model", {"0": layer})
    many = 1_048_577
    x = torch.randn(many, 64, generator=torch.Generator().manual_seed(0)).half()
    found = compiled(folder, linear(64, 64).half(), verify=False)(x)
    assert found.shape == (many, 64)
    plain = exact(linear(64, 64), {"0": layer})
    for start in (0, 65535 * 16 - 8, many - 40):
        part = slice(start, start + 40)
        torch.testing.assert_close(
            found[part].float(), plain(x[part].float()), rtol=2e-3, atol=2e-3
        )
    whole = plain(x[::1000].float())
    assert relative_l2(found[::1000], whole) < 1e-3


# **** B45: strides ****

BASE = torch.randn(12, 6, 128, generator=torch.Generator().manual_seed(1))
STRIDES: dict[str, torch.Tensor] = {
    "every second column": BASE[0][:, ::2],
    "transposed": torch.randn(64, 9, generator=torch.Generator().manual_seed(2)).t(),
    "a slice of rows": BASE[:, 1:, :64],
    "expanded": BASE[0, :1, :64].expand(5, 64),
    "permuted": BASE[:, :, :64].permute(1, 0, 2),
    "windows": BASE[0, 0].unfold(0, 64, 1)[::3],
}
KINDS: dict[str, Callable[[], Packed]] = {
    "gptq": lambda: gptq(32, 64, Gptq(4, 32, bias=True)),
    "actorder": lambda: gptq(32, 64, Gptq(4, 32, order="permuted", bias=True)),
    "awq": lambda: awq(32, 64, Awq(32, bias=True)),
    "int8": lambda: int_quantized(32, 64, Compressed(8, -1, bias=True)),
}


SHORT = ("every second column", "expanded")


@pytest.mark.parametrize("kind", KINDS)
def test_b45_strides(tmp_path: Path, kind: str) -> None:
    """A strided input gives the bits of its contiguous copy."""
    layer = KINDS[kind]()
    folder = write_folder(tmp_path / "model", {"0": layer})
    model = compiled(folder, linear(32, 64))
    plain = exact(linear(32, 64), {"0": layer})
    for name in STRIDES if kind == "gptq" else SHORT:
        x = STRIDES[name]
        assert not x.is_contiguous()
        found = model(x)
        assert torch.equal(found, model(x.contiguous())), name
        assert relative_l2(found, plain(x)) < BOUND, name


# **** B47: weights that lie the other way round ****


class Turned(nn.Module):
    """GPT-2's linear: weight ``[in, out]``."""

    def __init__(self, n: int, k: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.c = Conv1D(n, k)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.c(x)
        return out


def turned_exact(n: int, k: int, layer: Packed) -> Turned:
    module = Turned(n, k)
    state = {"c.weight": layer.exact.t(), "c.bias": layer.tensors["bias"].float()}
    module.load_state_dict(state)
    return module.eval().requires_grad_(False)


@pytest.mark.parametrize(("n", "k"), [(288, 96), (96, 96)])
def test_b47_conv1d(tmp_path: Path, n: int, k: int) -> None:
    """GPTQ stores GPT-2's layers as linears: run as such or refused, never the wrong way round."""
    layer = gptq(n, k, Gptq(4, 32, bias=True))
    folder = write_folder(tmp_path / "model", {"c": layer})
    turned = replace(layer, exact=layer.exact.t())
    try:
        found = compiled(folder, Turned(n, k))(rows(k))
    except qcompile.QCompileError as error:
        assert "c.weight" in str(error)  # noqa: PT017
        return
    assert turned.exact.shape == (k, n)
    assert relative_l2(found, turned_exact(n, k, layer)(rows(k))) < BOUND


def test_b47_conv1d_that_is_float(tmp_path: Path) -> None:
    """Beside a quantized linear, under its own shape."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.c, self.p = Conv1D(64, 96), nn.Linear(64, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.p(self.c(x))
            return out

    layers: dict[str, Packed | torch.Tensor] = {
        "c.weight": torch.randn(96, 64).bfloat16(),
        "c.bias": torch.randn(64).bfloat16(),
        "p": gptq(32, 64, Gptq(4, 32, bias=True)),
    }
    folder = write_folder(tmp_path / "model", layers)
    agrees(folder, Both, layers, rows(96))


def test_a_layer_used_the_other_way_round(tmp_path: Path) -> None:
    """A square weight that the module multiplies without turning it."""

    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.p = nn.Linear(64, 64, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.p.weight

    layers: dict[str, Packed | torch.Tensor] = {"p": gptq(64, 64, Gptq(4, 32))}
    folder = write_folder(tmp_path / "model", layers)
    try:
        found = compiled(folder, Square())(rows())
    except qcompile.QCompileError as error:
        assert "p.weight" in str(error)  # noqa: PT017
        return
    assert relative_l2(found, exact(Square(), layers)(rows())) < BOUND
    right_or_refused(folder, Square, layers)
