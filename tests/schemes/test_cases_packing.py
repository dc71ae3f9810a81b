"""Reported faults of packing and numbers, with words written by hand: B21 to B33.

Faults of quantizers (B27, B31, B35) are tested where the quantizers are.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from support.folders import agrees, compiled, exact, right_or_refused
from support.pack_awq import Awq, awq
from support.pack_compressed import Compressed, int_quantized, pack_quantized
from support.pack_float import fp8, mxfp4, nvfp4
from support.pack_gptq import Gptq, gptq
from support.packers import Config, Packed, write_folder
from torch import nn

import qcompile

DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}


def words(*values: int) -> torch.Tensor:
    """32-bit words as int32."""
    return torch.from_numpy(np.array(values, np.uint32).view(np.int32).copy())


def linear(n: int, k: int, bias: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(k, n, bias=bias))


def decoded(folder: Path, tensors: dict[str, torch.Tensor], config: Config) -> torch.Tensor:
    layer = Packed(tensors, torch.empty(0), config)
    return qcompile.open(write_folder(folder, {"0": layer})).dequantize("0.weight")


# **** B21: 3 bits straddle words ****


ZEROS = {  # 32 fields of 3 and of 4
    "gptq": (0xDB6DB6DB, 0xB6DB6DB6, 0x6DB6DB6D),
    "gptq_v2": (0x24924924, 0x49249249, 0x92492492),
}


@pytest.mark.parametrize("version", ZEROS)
def test_b21_three_bits(tmp_path: Path, version: str) -> None:
    """Codes 0 to 7 again and again: three words hold 32 of them. Every zero point is 4."""
    column = words(0x88FAC688, 0xC688FAC6, 0xFAC688FA).repeat(8)
    tensors = {
        "qweight": column[:, None].repeat(1, 64),
        "qzeros": words(*ZEROS[version]).repeat(2, 2),
        "scales": torch.full((2, 64), 0.5, dtype=torch.float16),
    }
    assert tensors["qweight"].shape == (24, 64)
    assert tensors["qzeros"].shape == (2, 6)
    for sym in (True, False):
        config = {**Gptq(3, 128, sym).config, "checkpoint_format": version}
        found = decoded(tmp_path / str(sym), tensors, config)
        assert torch.equal(found, ((torch.arange(256) % 8 - 4) * 0.5).expand(64, 256))


def test_b21_rows_that_do_not_fill_words(tmp_path: Path) -> None:
    layers = {"0": gptq(48, 256, Gptq(3, 128))}
    folder = write_folder(tmp_path / "model", layers)
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    agrees(folder, lambda: linear(48, 256), layers, x)


# **** B23: AWQ's nibbles ****


def test_b23_nibbles_of_awq(tmp_path: Path) -> None:
    """Columns 0 to 7 lie as 0, 2, 4, 6, 1, 3, 5, 7; zero points too, and nothing is added."""
    word = words(0x75316420)
    tensors = {
        "qweight": word.repeat(128, 8),
        "qzeros": words(0x02468ACE).repeat(4, 8),
        "scales": torch.full((4, 64), 0.25, dtype=torch.float16),
    }
    # 0x02468ACE: nibbles E, C, A, 8, 6, 4, 2, 0 are columns 0, 2, 4, 6, 1, 3, 5, 7
    zeros = torch.tensor([14, 6, 12, 4, 10, 2, 8, 0])
    expected = ((torch.arange(8) - zeros).float() * 0.25).repeat(8)[:, None].expand(64, 128)
    assert torch.equal(decoded(tmp_path / "model", tensors, Awq(32).config), expected)


# **** B25: 8 bits ****


def eight_bits(stored_zero: int) -> dict[str, torch.Tensor]:
    return {
        "qweight": words(0xFF807F00).repeat(16, 32),
        "qzeros": words(stored_zero * 0x01010101).repeat(1, 8),
        "scales": torch.full((1, 32), 0.125, dtype=torch.float16),
    }


@pytest.mark.parametrize(
    ("stored", "sym", "zero"), [(0x7F, True, 128), (0xFF, False, 0), (0x00, False, 1)]
)
@pytest.mark.filterwarnings("ignore:.*true values are lost")  # 0xff in every field looks like that
def test_b25_zero_points_of_eight_bits(tmp_path: Path, stored: int, sym: bool, zero: int) -> None:
    config = Gptq(8, -1, sym).config
    found = decoded(tmp_path / "model", eight_bits(stored), config)
    expected = (torch.tensor([0, 0x7F, 0x80, 0xFF]) - zero).float().repeat(16) * 0.125
    assert torch.equal(found, expected.expand(32, 64))


def test_symmetric_in_name_only(tmp_path: Path) -> None:
    """The config says symmetric, the zero points do not: theirs is the value, or an error."""
    layers = {"0": gptq(64, 64, Gptq(4, 32, sym=False, zeros="v2")).with_config(sym=True)}
    folder = write_folder(tmp_path / "model", layers)
    right_or_refused(folder, lambda: linear(64, 64), layers, "zero")


# **** B29: dtypes ****


@pytest.mark.parametrize(("x", "scale", "bias"), list(product(DTYPES, DTYPES, DTYPES)))
def test_b29_dtypes(tmp_path: Path, x: str, scale: str, bias: str) -> None:
    """The output has the dtype of the input; scales and biases may have any."""
    layer = gptq(32, 128, Gptq(4, 64, scale=scale, zeros="v2"))
    layer = layer.with_tensors(bias=torch.linspace(-1, 1, 32).to(DTYPES[bias]))
    folder = write_folder(tmp_path / "model", {"0": layer})
    dtype = DTYPES[x]
    given = torch.randn(9, 128, generator=torch.Generator().manual_seed(1)).to(dtype)
    module = linear(32, 128, bias=True).to(dtype)
    found = compiled(folder, module, verify=False)(given)
    assert found.dtype is dtype
    expected = exact(linear(32, 128, bias=True), {"0": layer})(given.float())
    bound = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(found.float(), expected, rtol=bound, atol=bound)


# **** B33: a bias twice ****

LAYERS: dict[str, Callable[[], Packed]] = {
    "gptq": lambda: gptq(32, 64, Gptq(4, 32)),
    "actorder": lambda: gptq(32, 64, Gptq(4, 32, order="permuted")),
    "awq": lambda: awq(32, 64, Awq(32)),
    "pack": lambda: pack_quantized(32, 64, Compressed(4, 32, symmetric=False)),
    "int8": lambda: int_quantized(32, 64, Compressed(8, -1)),
    "fp8": lambda: fp8(32, 64),
    "mxfp4": lambda: mxfp4(32, 64),
    "nvfp4": lambda: nvfp4(32, 64),
}


class After(nn.Module):
    """A linear and what a compiler would like to fuse into it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        known: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "nothing": lambda y: y,
            "relu": torch.relu,
            "add": lambda y: y + 1.0,
        }
        self.after = known[name]
        self.proj = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.proj(x))


@pytest.mark.parametrize(
    ("kind", "after"), [*((kind, "add") for kind in LAYERS), ("gptq", "nothing"), ("gptq", "relu")]
)
def test_b33_a_bias_is_added_once(tmp_path: Path, kind: str, after: str) -> None:
    numbers = torch.arange(32, dtype=torch.float16) - 5
    layer = LAYERS[kind]().with_tensors(bias=numbers)
    folder = write_folder(tmp_path / "model", {"proj": layer})
    expected = After(after).after(numbers.float())
    model = compiled(folder, After(after))
    for rows in (1, 7) if kind == "gptq" else (7,):
        assert torch.equal(model(torch.zeros(rows, 64)), expected.expand(rows, 32))


def test_b33_with_inductor(tmp_path: Path) -> None:
    numbers = torch.arange(32, dtype=torch.float16) - 5
    layer = LAYERS["gptq"]().with_tensors(bias=numbers)
    folder = write_folder(tmp_path / "model", {"proj": layer})
    found = compiled(folder, After("relu"), emitter="inductor")(torch.zeros(3, 64))
    assert torch.equal(found, torch.relu(numbers.float()).expand(3, 32))
