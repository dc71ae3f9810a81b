"""The writers of the tests agree with the files that other tools wrote: word for word.

What a stored layer means is read with inverses that live here, compared with what the tool that
wrote it says, and packed again.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from safetensors import safe_open
from support.pack_awq import ORDER, interleave
from support.pack_float import FP4, FP8, nibbles
from support.pack_gptq import Zeros, pack_zeros
from support.packers import Ints, affine, read_stream, stream
from support.zoo import Entry, as_hashed, digest, folder_entry

Tensors = Mapping[str, torch.Tensor]

GPTQ: dict[str, tuple[int, Zeros]] = {
    "gptq-w2-g32-asym": (2, "v1-gptqmodel"),
    "gptq-w4-chan-asym": (4, "v1-gptqmodel"),
    "gptq-w4-g128-sym": (4, "v1-gptqmodel"),
    "gptq-w4-g128-lmhead": (4, "v1-gptqmodel"),
    "gptq-w4-g32-asym-actorder": (4, "v1-gptqmodel"),
    "gptq-w8-chan-sym": (8, "v1-gptqmodel"),
    "gptqv2-w2-g64-sym-actorder": (2, "v2"),
    "moe-gptq-w4-g128-sym": (4, "v1-gptqmodel"),
    "ar-w2g32-asym": (2, "v2"),
    "ar-w4g128-sym-autogptq": (4, "v1"),
}


def layers(entry: Entry) -> dict[str, dict[str, torch.Tensor]]:
    """The stored tensors of the weights that the manifest knows."""
    found = {}
    with safe_open(entry.path / "model.safetensors", "pt") as file:
        for weight in entry.facts["weights"]:
            module = weight.removesuffix("weight")
            names = [name for name in file.keys() if name.startswith(module)]  # noqa: SIM118
            found[weight] = {name[len(module) :]: file.get_tensor(name) for name in names}
    return found


def agrees(entry: Entry, weight: str, found: torch.Tensor) -> None:
    facts = entry.facts["weights"][weight]
    assert list(found.shape) == facts["shape"]
    assert digest(as_hashed(entry, weight, found)) == facts["sha256"], weight


def read_zeros(words: torch.Tensor, bits: int, how: Zeros, count: int) -> Ints:
    """Zeros ``[N, G]``. GPTQModel took one from every field with one subtraction on the word."""
    if how == "v1-gptqmodel":
        ones = sum(1 << (bits * field) for field in range(32 // bits))
        raised = (words.numpy().astype(np.int64) + ones) & 0xFFFFFFFF
        words = torch.from_numpy(raised)
    zeros: Ints = read_stream(words, bits, count).T
    return zeros + 1 if how == "v1" else zeros


@pytest.mark.parametrize("name", GPTQ)
def test_gptq(name: str) -> None:
    entry = folder_entry(name)
    for weight, parts in layers(entry).items():
        bits, how = (8, GPTQ[name][1]) if weight.startswith("lm_head") else GPTQ[name]
        n = parts["scales"].shape[1]
        k = parts["qweight"].shape[0] * 32 // bits
        codes = read_stream(parts["qweight"].T, bits, k)
        zeros = read_zeros(parts["qzeros"], bits, how, n)
        count = parts["scales"].shape[0]
        groups = np.arange(k) * count // k
        if "g_idx" in parts:
            groups = parts["g_idx"].numpy().astype(np.int64)
        agrees(entry, weight, affine(codes, zeros, parts["scales"].T, groups))
        assert torch.equal(stream(codes, bits).T, parts["qweight"])
        assert torch.equal(pack_zeros(zeros, bits, how), parts["qzeros"])


@pytest.mark.parametrize("name", ["awq-gemm-w4-g128", "ar-w4g128-asym-autoawq"])
def test_awq(name: str) -> None:
    entry = folder_entry(name)
    for weight, parts in layers(entry).items():
        n = parts["scales"].shape[1]
        place = torch.tensor([8 * (i // 8) + ORDER.index(i % 8) for i in range(n)]).numpy()
        codes = read_stream(parts["qweight"], 4, n)[:, place].T
        zeros = read_stream(parts["qzeros"], 4, n)[:, place].T
        groups = np.arange(codes.shape[1]) // 128
        agrees(entry, weight, affine(codes, zeros, parts["scales"].T, groups))
        assert torch.equal(interleave(codes.T), parts["qweight"])
        assert torch.equal(interleave(zeros.T), parts["qzeros"])


@pytest.mark.parametrize("name", ["ct-w4a16-g128-sym", "moe-ct-w4a16-g128-sym"])
def test_pack_quantized(name: str) -> None:
    entry = folder_entry(name)
    for weight, parts in layers(entry).items():
        n, k = parts["weight_shape"].tolist()
        codes = read_stream(parts["weight_packed"], 4, k)
        zeros = np.full((n, k // 128), 8)
        agrees(entry, weight, affine(codes, zeros, parts["weight_scale"], np.arange(k) // 128))
        assert torch.equal(stream(codes, 4), parts["weight_packed"])


def test_fp8() -> None:
    entry = folder_entry("ct-fp8-dynamic")
    for weight, parts in layers(entry).items():
        codes = parts["weight"].view(torch.uint8).numpy()
        exact = torch.from_numpy(FP8[codes] * parts["weight_scale"].float().numpy())
        agrees(entry, weight, exact)


def test_mxfp4() -> None:
    entry = folder_entry("ct-mxfp4a16")
    for weight, parts in layers(entry).items():
        codes = read_nibbles(parts["weight_packed"])
        powers = np.exp2(parts["weight_scale"].numpy().astype(np.float32) - 127)
        agrees(entry, weight, torch.from_numpy(FP4[codes] * powers.repeat(32, axis=1)))
        assert torch.equal(nibbles(codes), parts["weight_packed"])


def test_nvfp4() -> None:
    entry = folder_entry("ct-nvfp4a16")
    for weight, parts in layers(entry).items():
        codes = read_nibbles(parts["weight_packed"])
        small = FP8[parts["weight_scale"].view(torch.uint8).numpy()]
        scales = small / parts["weight_global_scale"].numpy()
        exact = torch.from_numpy(FP4[codes] * scales.repeat(16, axis=1))
        agrees(entry, weight, exact)
        assert torch.equal(nibbles(codes), parts["weight_packed"])


def read_nibbles(packed: torch.Tensor) -> Ints:
    low, high = packed.numpy() & 15, packed.numpy() >> 4
    return np.stack([low, high], axis=-1).reshape(packed.shape[0], -1).astype(np.int64)
