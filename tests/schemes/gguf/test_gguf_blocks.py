"""Every block type decodes to the bits of gguf-py and of llama.cpp."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import gguf as oracle
import numpy as np
import pytest
import torch
from support.gguf_blocks import HALVES, finite_bytes, random_bytes

from qcompile.errors import LayoutError
from qcompile.layout import QuantizedTensor, layout_of
from qcompile.ops import decode_meaning, encode_meaning
from qcompile.schemes.gguf.blocks import BLOCKS, SPECS, decode_blocks
from qcompile.schemes.gguf.reader import GGUFFile
from qcompile.schemes.gguf.type_table import BY_NAME

ZOO = Path(__file__).parents[4] / "shared" / "zoo"
NOT_IN_GGUF_PY = {"q1_0", "q2_0"}
KNOWN = sorted(set(BLOCKS) - NOT_IN_GGUF_PY)


def oracle_values(name: str, data: torch.Tensor) -> np.ndarray:
    with np.errstate(all="ignore"):
        kind = oracle.GGMLQuantizationType[name.upper()]
        return np.asarray(oracle.quants.dequantize(data.numpy(), kind))


def assert_same_bits(found: torch.Tensor, wanted: np.ndarray) -> None:
    assert found.dtype == torch.float32
    assert found.shape == wanted.shape
    numbers = ~np.isnan(wanted)
    assert np.array_equal(~np.isnan(found.numpy()), numbers)
    assert np.array_equal(found.numpy()[numbers].view(np.int32), wanted[numbers].view(np.int32))


@pytest.mark.parametrize("name", KNOWN)
def test_random_bytes(name: str) -> None:
    data = random_bytes(name, 48, 5)
    assert_same_bits(decode_blocks(name, data), oracle_values(name, data))


@pytest.mark.parametrize("name", KNOWN)
def test_zero_subnormal_and_negative_scales(name: str) -> None:
    data = finite_bytes(name, 16, 3)
    wanted = oracle_values(name, data)
    if name != "mxfp4":
        assert np.isfinite(wanted).all()
    assert_same_bits(decode_blocks(name, data), wanted)


@pytest.mark.parametrize("name", KNOWN)
def test_infinite_scales(name: str) -> None:
    data = random_bytes(name, 4, 64)
    flat = data.view(-1, BLOCKS[name].spec.bytes)
    if name == "iq1_m":
        flat[:, 49:56:2] &= 0x0F
        flat[:, 53] |= 0xC0
        flat[:, 55] |= 0x70
    for start in HALVES[name][:1]:
        flat[::2, start : start + 2] = torch.tensor([0, 0x7C], dtype=torch.uint8)
    wanted = oracle_values(name, data)
    assert name == "nvfp4" or np.isinf(wanted).any()
    assert_same_bits(decode_blocks(name, data), wanted)


@pytest.mark.parametrize(("name", "scales"), [("mxfp4", 1), ("nvfp4", 4)])
def test_every_scale_byte_with_every_code(name: str, scales: int) -> None:
    size = BLOCKS[name].spec
    data = torch.zeros(256, size.bytes, dtype=torch.uint8)
    data[:, :scales] = torch.arange(256)[:, None]
    data[:, scales:] = torch.tensor([0x01, 0x23, 0x45, 0x67, 0x89, 0xAB, 0xCD, 0xEF]).repeat(
        (size.bytes - scales) // 8
    )
    assert_same_bits(decode_blocks(name, data), oracle_values(name, data))


def test_one_and_two_bit_types() -> None:
    half = np.array([-0.375], dtype=np.float16).view(np.uint8).tolist()
    bits = torch.tensor([[*half, 0b10110010, *[0] * 15]], dtype=torch.uint8)
    assert (decode_blocks("q1_0", bits)[0, :9] / -0.375).tolist() == [
        -1,
        1,
        -1,
        -1,
        1,
        1,
        -1,
        1,
        -1,
    ]
    assert (decode_blocks("q2_0", bits)[0, :5] / -0.375).tolist() == [1, -1, 2, 1, -1]


def test_no_rows_and_leading_dimensions() -> None:
    for name, block in BLOCKS.items():
        data = random_bytes(name, 6, 2)
        whole = decode_blocks(name, data)
        assert decode_blocks(name, data[:0]).shape == (0, 2 * block.spec.elements)
        again = decode_blocks(name, data.view(2, 3, -1))
        assert torch.equal(again.view(6, -1).view(torch.int32), whole.view(torch.int32))


def test_the_types_size_and_the_oracles_agree() -> None:
    for name in set(BY_NAME) - NOT_IN_GGUF_PY:
        kind = oracle.GGMLQuantizationType[name.upper()]
        elements, size = oracle.GGML_QUANT_SIZES[kind]
        assert (BY_NAME[name].id, BY_NAME[name].elements, BY_NAME[name].bytes) == (
            kind.value, elements, size
        )  # fmt: skip


@pytest.mark.parametrize("name", sorted(BLOCKS))
def test_layout(name: str) -> None:
    size = BLOCKS[name].spec
    layout = layout_of(f"gguf.{name}")
    shape = (3, 2 * size.elements)
    assert layout.nbytes(size, shape) == 6 * size.bytes
    weight = QuantizedTensor(size, layout.name, shape, {"data": random_bytes(name, 3, 2)})
    weight.check(name)
    spec, meant, _ = decode_meaning(encode_meaning(weight))
    assert layout_of(meant).fields(spec, shape) == layout.fields(size, shape)
    with pytest.raises(LayoutError, match="multiple"):
        layout.fields(size, (3, size.elements + 1))
    with pytest.raises(LayoutError, match="spec float32"):
        layout.fields(SPECS["f32"], shape)


def zoo_entries() -> list[dict[str, object]]:
    path = ZOO / "manifest.json"
    if not path.exists():
        return []
    entries = json.loads(path.read_text())["entries"]
    return [entry for entry in entries if entry["format"] == "gguf"]


@pytest.mark.parametrize("entry", zoo_entries(), ids=lambda entry: str(entry["id"]))
def test_zoo_weights_have_their_hashes(entry: dict[str, object]) -> None:
    assert isinstance(entry["weights"], dict)
    with GGUFFile.open(ZOO / str(entry["path"])) as file:
        for label, facts in entry["weights"].items():
            name, _, expert = label.partition("[")
            weight = file.weight(name)
            values = weight.dequantize()
            if expert:
                values = values[int(expert.removesuffix("]"))]
            # The manifest counts -0.0 as 0.0.
            digest = hashlib.sha256((values + 0.0).numpy().tobytes()).hexdigest()
            assert digest == facts["sha256"], (label, str(weight.spec))


def test_zoo_covers_every_type() -> None:
    path = ZOO / "gguf" / "gguf-potpourri.gguf"
    if not path.exists():
        pytest.skip(f"no {path.name}: the conformance zoo is not beside the repository")
    with GGUFFile.open(path) as file:
        assert {info.type_name for info in file.tensors.values()} == {*SPECS}
