"""Files that are damaged or not GGUF: one SchemeError that says so, never anything else."""

from __future__ import annotations

import os
import pickle
import random
import struct
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from support.gguf_bytes import ARRAY, BOOL, I32, STRING, gguf, key, nested, tensor, text, u32

from qcompile.errors import SchemeError
from qcompile.schemes.gguf.reader import GGUFFile

ONE = tensor("t", (32,), 0, 0)
DATA = bytes(128)
ALIGNMENT = "general.alignment"


def refusal(path: Path, content: bytes) -> SchemeError:
    path.write_bytes(content)
    with pytest.raises(SchemeError) as caught:
        GGUFFile.open(path)
    error = caught.value
    assert str(path) in error.where
    assert error.found
    assert error.needed
    assert error.fix
    assert str(error).isprintable() or "\n" in str(error)
    return error


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "an empty file"),
        (b"GG", "starts with b'GG'"),
        (b"GGUF", "inside the version"),
        (b"GGUF\3\0\0\0", "inside the tensor count"),
        (b"PK\3\4" + bytes(60), "a zip archive"),
        (pickle.dumps({"a": [1, 2, 3]}), "a Python pickle"),
        (struct.pack("<Q", 20) + b'{"__metadata__": {}}', "a safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a git-lfs pointer"),
        (b"<!DOCTYPE html><html></html>", "an HTML page"),
        (b"\n  <html>", "an HTML page"),
        (b'{"error": "not found"}', "a JSON text"),
        (b"lmgg" + bytes(60), "a GGML file"),
        (b"tjgg" + bytes(60), "a GGJT file"),
        (b"FUGG" + bytes(60), "bytes swapped"),
        (gguf(version=1), "GGUF version 1"),
        (gguf(version=4), "GGUF version 4"),
        (gguf(version=99), "GGUF version 99"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian GGUF file of version 3"),
        (b"GGUF" + struct.pack(">IQQ", 2, 0, 0), "big-endian GGUF file of version 2"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "file",
)
def test_other_files_are_named(tmp_path: Path, content: bytes, found: str) -> None:
    assert found in str(refusal(tmp_path / "model.gguf", content))


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (gguf(key_count=1 << 60), "claims 1152921504606846976 keys"),
        (gguf(tensor_count=1 << 63), "claims 9223372036854775808 tensors"),
        (gguf([u32("a", 1)], key_count=2), "claims 2 keys"),
        (gguf([u32("a", 1), u32("a", 2)]), "key 'a' appears twice"),
        (gguf([u32("", 1)]), "key 0 has 0 bytes"),
        (gguf([key("k" * 65536, BOOL, b"\1")]), "key 0 has 65536 bytes"),
        (gguf([key(b"\xff\xfe", BOOL, b"\1")]), r"key 0 is b'\xff\xfe'"),
        (gguf([key("a", 13, b"\1")]), "'a' has value type 13"),
        (gguf([key("a", 0xFFFFFFFF, b"\1")]), "'a' has value type 4294967295"),
        (gguf([key("a", STRING, struct.pack("<Q", 1 << 31) + b"b")]), "inside the text of 'a'"),
        (gguf([key("a", STRING, struct.pack("<Q", (1 << 64) - 1))]), "inside the text of 'a'"),
        (gguf([key("a", STRING, text("abc")[:-1])]), "inside the text of 'a'"),
        (gguf([key("a", ARRAY, struct.pack("<IQ", 4, 1 << 61))]), "claims 2305843009213693952"),
        (gguf([key("a", ARRAY, struct.pack("<IQ", STRING, 9))]), "claims 9 elements"),
        (gguf([key("a", ARRAY, struct.pack("<IQ", 77, 0))]), "'a' has value type 77"),
        (gguf([key("a", ARRAY, struct.pack("<I", 4))]), "inside the array 'a'"),
        (gguf([key("a", ARRAY, nested(9))]), "nests arrays too deep"),
        (gguf([key("a", ARRAY, nested(20000))]), "nests arrays too deep"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "file",
)
def test_damaged_metadata(tmp_path: Path, content: bytes, found: str) -> None:
    assert found in str(refusal(tmp_path / "model.gguf", content))


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (gguf([], [tensor("t", (), 0, 0)], DATA), "has 0 dimensions"),
        (gguf([], [tensor("t", (1,) * 5, 0, 0)], DATA), "has 5 dimensions"),
        (gguf([], [tensor("t", (32, 0), 0, 0)], DATA), "has dimensions [32, 0]"),
        (gguf([], [tensor("t", (32, 1 << 63), 0, 0)], DATA), "has dimensions"),
        (gguf([], [tensor("t", (1 << 62, 4), 0, 0)], DATA), "18446744073709551616 elements"),
        (gguf([], [tensor("t", ((1 << 62) + 2, 4), 0, 0)], DATA), "elements"),
        (gguf([], [tensor("t", (1 << 40, 1 << 30), 77, 0)], DATA), "elements"),
        (gguf([], [tensor("t", (33, 1), 2, 0)], DATA), "q4_0 has 33 columns"),
        (gguf([], [tensor("t", (64, 4), 0, 0)], DATA), "needs 1024 bytes, the file ends at"),
        (gguf([], [tensor("t", (32,), 0, 1 << 63)], DATA), "the file ends at"),
        (gguf([], [tensor("t", (4,), 0, 4)], DATA), "starts at offset 4"),
        (gguf([], [ONE, ONE], DATA), "'t' appears twice"),
        (gguf([], [ONE, tensor("u", (8,), 0, 96)], DATA), "'t' and 'u' share bytes"),
        (gguf([], [tensor("", (32,), 0, 0)], DATA), "name has 0 bytes"),
        (gguf([], [tensor("t" * 4097, (32,), 0, 0)], DATA), "name has 4097 bytes"),
        (gguf([], [tensor(b"t\x80", (32,), 0, 0)], DATA), r"name is b't\x80'"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "file",
)
def test_damaged_tensors(tmp_path: Path, content: bytes, found: str) -> None:
    assert found in str(refusal(tmp_path / "model.gguf", content))


@pytest.mark.parametrize(
    "alignment",
    [
        u32(ALIGNMENT, 0),
        u32(ALIGNMENT, 24),
        u32(ALIGNMENT, 1 << 21),
        u32(ALIGNMENT, 1 << 31),
        key(ALIGNMENT, I32, struct.pack("<i", -32)),
        key(ALIGNMENT, I32, struct.pack("<i", 32)),
        key(ALIGNMENT, STRING, text("32")),
        key(ALIGNMENT, ARRAY, struct.pack("<IQI", 4, 1, 32)),
    ],
    ids=["zero", "24", "2e21", "2e31", "negative", "signed", "text", "array"],
)
def test_bad_alignment(tmp_path: Path, alignment: bytes) -> None:
    error = refusal(tmp_path / "model.gguf", gguf([alignment], [ONE], DATA))
    assert ALIGNMENT in error.found
    assert "power of two" in error.needed


def test_missing_file_and_not_a_file(tmp_path: Path) -> None:
    for path, found in (
        (tmp_path / "none.gguf", "no such file"),
        (tmp_path / "a\0b.gguf", "null"),
        (tmp_path, "no .gguf file"),
    ):
        with pytest.raises(SchemeError, match=found):
            GGUFFile.open(path)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.gguf")
        with pytest.raises(SchemeError, match="not a regular file"):
            GGUFFile.open(tmp_path / "pipe.gguf")


def test_pickle_under_a_gguf_name_is_not_loaded(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    refusal(tmp_path / "model.gguf", pickle.dumps(_Touch(str(marker)), protocol=4))
    assert not marker.exists()


class _Touch:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (open, (self.path, "w"))


def whole() -> bytes:
    strings = struct.pack("<IQ", STRING, 3) + text("a") + text("bc") + text("")
    keys = [
        key("general.architecture", STRING, text("llama")),
        key("tokens", ARRAY, strings),
        key("deep", ARRAY, nested(3)),
        key("flag", BOOL, b"\1"),
        u32(ALIGNMENT, 32),
    ]
    tensors = [tensor("a.weight", (32, 4), 2, 0), tensor("b.weight", (8,), 0, 96)]
    return gguf(keys, tensors, bytes(range(128)))


def use(path: Path) -> None:
    """Open a file and touch everything in it, or get a SchemeError."""
    try:
        with GGUFFile.open(path) as file:
            values = [file.metadata[name] for name in file.metadata]
            assert len(values) == len(file.metadata)
            for name in file.tensors:
                file.weight(name).dequantize()
    except SchemeError:
        return


def written(path: Path) -> bytes:
    """A file by gguf-py's writer."""
    writer = GGUFWriter(path, "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "\u20ac"])
    writer.add_array("tokenizer.ggml.scores", [0.5, 1.5])
    writer.add_float32("llama.rope.freq_base", 10000.0)
    rows = np.linspace(-1, 1, 256, dtype=np.float32).reshape(4, 64)
    for kind in (GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_1):
        writer.add_tensor(kind.name, quantize(rows, kind), raw_dtype=kind)
    writer.add_tensor("norm", rows[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def test_truncated_anywhere(tmp_path: Path) -> None:
    content = whole()
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert len(GGUFFile.open(path).tensors) == 2
    for length in range(len(content)):
        refusal(path, content[:length])


@pytest.mark.parametrize("maker", ["own", "gguf-py"])
def test_random_damage_opens_or_is_refused(tmp_path: Path, maker: str) -> None:
    path = tmp_path / "model.gguf"
    content = whole() if maker == "own" else written(path)
    path.write_bytes(content)
    head = min(info.offset for info in GGUFFile.open(path).tensors.values())
    draw = random.Random(7)
    for _ in range(1000):
        damaged = bytearray(content)
        for _ in range(draw.choice((1, 1, 2, 8))):
            damaged[draw.randrange(head)] = draw.choice(
                (0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256))
            )
        cut = len(damaged) if draw.random() < 0.8 else draw.randrange(len(damaged))
        path.write_bytes(bytes(damaged[:cut]))
        use(path)
