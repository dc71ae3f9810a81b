"""Folders of every format decode bit for bit: bits x group x zeros x order x shape.

The shapes are odd on purpose: one row, seven rows, K that leaves a short last group. Left out, as
no writer makes them and the stored shapes would not say what was meant: GPTQ words that K does not
fill, AWQ ``gemm`` with N that is no multiple of 8, AWQ, MXFP4 and NVFP4 with a short last group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.pack_awq import Awq, Version, awq
from support.pack_compressed import ActOrder, Compressed, Packing, int_quantized, pack_quantized
from support.pack_float import Strategy, fp8, mxfp4, nvfp4
from support.pack_gptq import Gptq, Order, Zeros, auto_round_config, gptq
from support.packers import Packed, write_folder

import qcompile
from qcompile.spec import AffineSpec, is_quantized

SHAPES = ((1, 192), (7, 192), (48, 192))
STORED: dict[str, tuple[Zeros, bool]] = {
    "v1-sym": ("v1", True),
    "v1-asym": ("v1", False),
    "v1-wrap": ("v1-wrap", False),
    "gptqmodel-sym": ("v1-gptqmodel", True),
    "gptqmodel-asym": ("v1-gptqmodel", False),
    "v2-sym": ("v2", True),
    "v2-asym": ("v2", False),
}
ORDERS: dict[int, tuple[Order, ...]] = {
    -1: ("absent", "trivial"),
    32: ("absent", "trivial", "permuted", "arbitrary"),
    128: ("absent", "trivial", "permuted"),
}


def check(folder: Path, layers: Mapping[str, Packed], scheme: str, bits: int | None = None) -> None:
    """Write layers of one config, open them and compare every bit."""
    write_folder(folder, layers)
    checkpoint = qcompile.open(folder)
    assert checkpoint.scheme == scheme
    for name, layer in layers.items():
        weight = checkpoint.tensors[f"{name}.weight"]
        assert weight.shape == tuple(layer.exact.shape), name
        assert is_quantized(weight.spec)
        assert bits is None or (isinstance(weight.spec, AffineSpec) and weight.spec.bits == bits)
        same(checkpoint.dequantize(f"{name}.weight"), layer.exact, name)
        if "bias" in layer.tensors:
            bias = checkpoint.dequantize(f"{name}.bias")
            assert torch.equal(bias, layer.tensors["bias"].float()), name


def same(found: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    assert found.dtype is torch.float32
    assert found.shape == expected.shape, name
    different = (found != expected).nonzero()
    assert torch.equal(found, expected), f"{name}: {len(different)} differ, first {different[:3]}"


def named(n: int, k: int) -> str:
    return f"n{n}_k{k}"


# **** GPTQ ****


@pytest.mark.filterwarnings("ignore:.*true values are lost")  # v1-wrap may look like that
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("group", "order"), [(group, order) for group, orders in ORDERS.items() for order in orders]
)
def test_gptq(tmp_path: Path, bits: int, group: int, order: Order, stored: str) -> None:
    zeros, sym = STORED[stored]
    what = Gptq(bits, group, sym, zeros, order)
    layers = {named(n, k): gptq(n, k, what, seed=n) for n, k in SHAPES}
    check(tmp_path / "gptq", layers, "gptq", bits)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("zeros", ["empty", "absent"])
def test_gptq_without_zeros(tmp_path: Path, bits: int, zeros: Zeros) -> None:
    what = Gptq(bits, 64, True, zeros)
    check(tmp_path / "g", {named(n, k): gptq(n, k, what) for n, k in SHAPES}, "gptq", bits)


@pytest.mark.parametrize("scale", ["F16", "BF16", "F32"])
@pytest.mark.parametrize("zeros", ["v1", "v2"])
def test_gptq_scales_keep_their_dtype(tmp_path: Path, scale: str, zeros: Zeros) -> None:
    what = Gptq(4, 64, False, zeros, "permuted", scale, bias=True)
    check(tmp_path / "g", {named(n, k): gptq(n, k, what) for n, k in SHAPES}, "gptq", 4)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_gptq_zeros_that_were_lost(tmp_path: Path, bits: int) -> None:
    """AutoGPTQ's -1 sets every higher bit of its word: what is left reads as zeros of 0."""
    what = Gptq(bits, 64, False, "v1", lossy=True)
    zeros = (torch.arange(2, 34)[:, None] % min(1 << bits, 8)).numpy()
    expected = zeros.copy()
    each = 32 // bits
    for start in range(0, 32, each):
        word = zeros[start : start + each, 0]
        first = word.tolist().index(0) if 0 in word else each
        expected[start + first : start + each] = 0
    stored, meant = (gptq(32, 64, what, zeros=given) for given in (zeros, expected))
    with pytest.warns(UserWarning, match="zero"):
        check(tmp_path / "g", {"m": replace(stored, exact=meant.exact)}, "gptq", bits)


@pytest.mark.parametrize("quantizer", [["gptqmodel:1.4.5"], "gptqmodel:7.4.0", ["gptqmodel"]])
def test_gptqmodel_by_its_name(tmp_path: Path, quantizer: object) -> None:
    layer = gptq(32, 64, Gptq(4, 32, False, "v1-gptqmodel"))
    layer = layer.with_config(meta={"quantizer": quantizer, "uri": "https://example.org"})
    check(tmp_path / "g", {"m": layer}, "gptq", 4)


# **** AWQ ****


@pytest.mark.parametrize("version", ["gemm", "gemv"])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("zero_point", [True, False])
@pytest.mark.parametrize("scale", ["F16", "BF16"])
def test_awq(tmp_path: Path, version: Version, group: int, zero_point: bool, scale: str) -> None:
    what = Awq(group, zero_point, version, scale, bias=True)
    shapes = ((8, 128), (48, 256), (72, 384))
    check(tmp_path / "awq", {named(n, k): awq(n, k, what) for n, k in shapes}, "awq", 4)


def test_awq_with_the_older_names(tmp_path: Path) -> None:
    what = Awq(64, old_names=True)
    check(tmp_path / "awq", {"m": awq(48, 128, what)}, "awq", 4)


# **** AutoRound ****


@pytest.mark.parametrize("packing", ["auto_round", "auto_round:gptqmodel", "auto_round:auto_gptq"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group", [-1, 32, 128])
@pytest.mark.parametrize("sym", [True, False])
def test_auto_round(tmp_path: Path, packing: str, bits: int, group: int, sym: bool) -> None:
    zeros: Zeros = "v1" if packing.endswith("auto_gptq") else "v2"
    what = Gptq(bits, group, sym, zeros, "absent")
    config = auto_round_config(packing, what)
    layers = {named(n, k): replace(gptq(n, k, what), config=config) for n, k in SHAPES}
    check(tmp_path / "auto_round", layers, "auto_round", bits)


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("sym", [True, False])
def test_auto_round_as_awq(tmp_path: Path, group: int, sym: bool) -> None:
    config = auto_round_config("auto_round:auto_awq", Gptq(4, group, sym))
    layers = {
        named(n, k): replace(awq(n, k, Awq(group, not sym)), config=config)
        for n, k in ((8, 128), (48, 256))
    }
    check(tmp_path / "auto_round", layers, "auto_round", 4)


# **** compressed-tensors ****


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("packing", ["dense", "words"])
@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("group", [-1, 32, 128])
def test_pack_quantized(
    tmp_path: Path, bits: int, group: int, symmetric: bool, packing: Packing
) -> None:
    """48 rows of 3 bits make 5 words of zero points in both packings: the weight decides."""
    what = Compressed(bits, group, symmetric, packing)
    layers = {named(n, k): pack_quantized(n, k, what) for n, k in SHAPES}
    check(tmp_path / "ct", layers, "compressed_tensors", bits)


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("actorder", ["group", "weight", "static"])
@pytest.mark.parametrize("bits", [4, 8])
def test_pack_quantized_in_another_order(
    tmp_path: Path, bits: int, actorder: ActOrder, symmetric: bool
) -> None:
    what = Compressed(bits, 32, symmetric, actorder=actorder, scale="F16")
    layers = {named(n, k): pack_quantized(n, k, what) for n, k in SHAPES}
    check(tmp_path / "ct", layers, "compressed_tensors", bits)


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("group", [-1, 32, 128])
@pytest.mark.parametrize("activations", [True, False], ids=["w8a8", "w8a16"])
def test_int_quantized(tmp_path: Path, group: int, symmetric: bool, activations: bool) -> None:
    what = Compressed(8, group, symmetric, scale="F32", bias=True, activations=activations)
    layers = {named(n, k): int_quantized(n, k, what) for n, k in SHAPES}
    check(tmp_path / "ct", layers, "compressed_tensors", 8)


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("bits", range(2, 8))
def test_int_quantized_of_fewer_bits(tmp_path: Path, bits: int, symmetric: bool) -> None:
    what = Compressed(bits, 32, symmetric)
    layers = {named(n, k): int_quantized(n, k, what) for n, k in SHAPES}
    check(tmp_path / "ct", layers, "compressed_tensors")


@pytest.mark.parametrize("scale", ["BF16", "F32", "F16"])
@pytest.mark.parametrize("activations", [True, False], ids=["a8", "a16"])
def test_fp8(tmp_path: Path, scale: str, activations: bool) -> None:
    strategies: tuple[Strategy, ...] = ("channel", "tensor")
    for strategy in strategies:
        layers = {
            named(n, k): fp8(n, k, strategy, scale=scale, activations=activations)
            for n, k in SHAPES
        }
        check(tmp_path / strategy, layers, "compressed_tensors")


@pytest.mark.parametrize("block", [(128, 128), (16, 32), (1, 128), (5, 7)])
def test_fp8_in_blocks(tmp_path: Path, block: tuple[int, int]) -> None:
    layers = {named(n, k): fp8(n, k, "block", block) for n, k in (*SHAPES, (130, 260))}
    check(tmp_path / "ct", layers, "compressed_tensors")


def test_mxfp4(tmp_path: Path) -> None:
    """The smallest scales make subnormal values, which are exact too."""
    shapes = (*SHAPES, (48, 32))
    layers = {named(n, k): mxfp4(n, k, extremes=True) for n, k in shapes}
    check(tmp_path / "ct", layers, "compressed_tensors")


def test_nvfp4(tmp_path: Path) -> None:
    layers = {named(n, k): nvfp4(n, k) for n, k in (*SHAPES, (48, 32))}
    check(tmp_path / "ct", layers, "compressed_tensors")
