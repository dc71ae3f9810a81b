"""Valid files: values, tensors, rows, floats, alignment, shards; gguf-py is the oracle."""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from pathlib import Path

import gguf as oracle
import numpy as np
import pytest
import torch
from support.gguf_bytes import ARRAY, BOOL, STRING, gguf, key, nested, tensor, text, u32

from qcompile.errors import SchemeError
from qcompile.schemes.gguf.reader import GGUFFile
from qcompile.spec import BlockSpec, FloatSpec


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_values_of_every_type(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = oracle.GGUFWriter(path, "llama")
    wanted: dict[str, object] = {"general.architecture": "llama"}
    for name, value in (
        ("uint8", 200), ("int8", -100), ("uint16", 60000), ("int16", -30000), ("uint32", 1 << 31),
        ("int32", -(1 << 30)), ("uint64", 1 << 63), ("int64", -(1 << 62)), ("float32", 0.25),
        ("float64", 0.1), ("bool", True), ("string", "h\u00e9"),
    ):  # fmt: skip
        getattr(writer, f"add_{name}")(f"x.{name}", value)
        wanted[f"x.{name}"] = value
    arrays: dict[str, Sequence[object]] = {
        "ints": [1, -2], "floats": [0.5, 2.0], "texts": ["a", "", "\u20ac"], "flags": [True, False]
    }  # fmt: skip
    for name, values in arrays.items():
        writer.add_array(name, values)
        wanted[name] = values
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with GGUFFile.open(path) as file:
        assert dict(file.metadata) == wanted
        assert file.metadata.count("texts") == 3
        assert file.metadata.count("x.bool") is None
        assert "absent" not in file.metadata


def test_version_2_nested_arrays_and_odd_text(tmp_path: Path) -> None:
    keys = [
        key("deep", ARRAY, nested(8)),
        key("none", ARRAY, struct.pack("<IQ", STRING, 0)),
        key("bytes", STRING, text(b"\xffa")),
        key("maybe", BOOL, b"\2"),
    ]
    name = "n" * 65
    path = write(tmp_path / "m.gguf", gguf(keys, [tensor(name, (2,), 0, 0)], bytes(8), version=2))
    with GGUFFile.open(path) as file:
        assert file.metadata["deep"] == [[[[[[[[7]]]]]]]]
        assert file.metadata["none"] == []
        assert file.metadata["bytes"] == r"\xffa"
        assert list(file.tensors) == [name]
        with pytest.raises(SchemeError, match="neither 0 nor 1"):
            file.metadata["maybe"]


@pytest.mark.parametrize("alignment", [1, 8, 16, 64, 1 << 20])
@pytest.mark.parametrize("residue", [0, 1, 13])
def test_alignment(tmp_path: Path, alignment: int, residue: int) -> None:
    values = np.arange(1, 5, dtype=np.float32)
    step = -(-8 // alignment) * alignment
    keys = [u32("general.alignment", alignment), key("pad", STRING, text("x" * residue))]
    tensors = [tensor("a", (2,), 0, 0), tensor("b", (2,), 0, step)]
    data = values[:2].tobytes() + bytes(step - 8) + values[2:].tobytes()
    path = write(tmp_path / "m.gguf", gguf(keys, tensors, data, alignment=alignment))
    with GGUFFile.open(path) as file:
        assert file.weight("a").dequantize().tolist() == [1, 2]
        assert file.weight("b").dequantize().tolist() == [3, 4]


def test_float_types_are_exact(tmp_path: Path) -> None:
    half = np.array([[1.0, -0.0, 6e-8, 65504]], dtype=np.float16)
    brain = struct.pack("<4H", 0x3F80, 0xC000, 0x0001, 0x7F7F)
    data = b"".join(part.ljust(32, b"\0") for part in (half.tobytes(), brain))
    tensors = [tensor("half", (4, 1), 1, 0), tensor("brain", (4, 1), 30, 32)]
    with GGUFFile.open(write(tmp_path / "m.gguf", gguf([], tensors, data))) as file:
        assert file.weight("half").spec == FloatSpec(torch.float16)
        found = file.weight("half").load().parts["data"]
        assert found.view(torch.int16).tolist() == half.view(np.int16).tolist()
        found = file.weight("brain").load().parts["data"].view(torch.int16)
        assert found.numpy().tobytes() == brain


def blocks(rows: int, columns: int) -> np.ndarray:
    values = np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)
    return np.asarray(oracle.quants.quantize(values, oracle.GGMLQuantizationType.Q8_0))


def test_rows_of_a_quantized_weight(tmp_path: Path) -> None:
    packed = blocks(6, 64)
    path = write(tmp_path / "m.gguf", gguf([], [tensor("w", (64, 6), 8, 0)], packed.tobytes()))
    with GGUFFile.open(path) as file:
        weight = file.weight("w")
        assert (weight.layout, weight.shape, weight.nbytes) == ("gguf.q8_0", (6, 64), packed.nbytes)
        assert isinstance(weight.spec, BlockSpec)
        assert weight.source == f"{path}: w"
        weight.load().check("w")
        some = weight.read(slice(2, 5))
        some.check("some")
        assert some.shape == (3, 64)
        whole = weight.load().parts["data"]
        assert some.parts["data"].data_ptr() == whole[2].data_ptr() != 0
        order = torch.tensor([5, 0, 5])
        wanted = oracle.quants.dequantize(packed, oracle.GGMLQuantizationType.Q8_0)
        assert weight.read(order).dequantize().numpy().tolist() == wanted[[5, 0, 5]].tolist()
        assert weight.read(slice(0, 0)).dequantize().shape == (0, 64)
        assert weight.with_rows(torch.arange(5, -1, -1)).load().parts["data"][0].tolist() == (
            packed[5].tolist()
        )


def test_experts_keep_three_dimensions(tmp_path: Path) -> None:
    packed = blocks(6, 64)
    path = write(tmp_path / "m.gguf", gguf([], [tensor("w", (64, 3, 2), 8, 0)], packed.tobytes()))
    with GGUFFile.open(path) as file:
        weight = file.weight("w")
        assert weight.shape == (2, 3, 64)
        weight.load().check("w")
        last = weight.read(slice(1, 2))
        wanted = oracle.quants.dequantize(packed, oracle.GGMLQuantizationType.Q8_0)
        assert last.dequantize().numpy().tolist() == [wanted[3:].tolist()]


def test_release_drops_pages_and_keeps_values(tmp_path: Path) -> None:
    packed = blocks(4096, 1024)
    path = write(tmp_path / "m.gguf", gguf([], [tensor("w", (1024, 4096), 8, 0)], packed.tobytes()))
    status = Path("/proc/self/statm")
    if not status.exists():
        pytest.skip("needs /proc to count resident pages")

    def resident() -> int:
        return int(status.read_text().split()[1])

    with GGUFFile.open(path) as file:
        weight = file.weight("w")
        data = weight.load().parts["data"]
        total = int(data.sum())
        before = resident()
        weight.release()
        assert before - resident() > packed.nbytes // 4096 // 2
        assert int(data.sum()) == total


def test_types_that_cannot_be_weights(tmp_path: Path) -> None:
    tensors = [
        tensor("odd", (5, 3), 77, 0), tensor("ints", (4,), 26, 32), tensor("q8_k", (4,), 15, 64),
        tensor("flat", (32,), 8, 96), tensor("fine", (1,), 0, 160),
    ]  # fmt: skip
    path = write(tmp_path / "m.gguf", gguf([], tensors, bytes(164)))
    with GGUFFile.open(path) as file:
        assert file.tensors["odd"].type_name == "type 77"
        assert file.tensors["odd"].nbytes is None
        for name, found in (
            ("odd", "type is 77"),
            ("ints", "type is i32"),
            ("q8_k", "type is 15 .q8_k"),
            ("flat", "a vector of quantized type q8_0"),
            ("fina", "did you mean 'fine'"),
        ):
            with pytest.raises(SchemeError, match=found):
                file.weight(name)
        assert file.weight("fine").dequantize().tolist() == [0.0]
        fine = file.weight("fine")
    with pytest.raises(SchemeError, match="was closed"):
        fine.load()
    fine.release()


def shard(index: int, count: int, names: Sequence[str], total: int) -> bytes:
    keys = [
        key("split.no", 2, struct.pack("<H", index)),
        key("split.count", 2, struct.pack("<H", count)),
        key("split.tensors.count", 5, struct.pack("<i", total)),
    ]
    tensors = [tensor(name, (2,), 0, 32 * place) for place, name in enumerate(names)]
    data = b"".join(struct.pack("<2f", index, place) + bytes(24) for place in range(len(names)))
    return gguf(keys, tensors, data)


def shards(folder: Path) -> list[Path]:
    contents = [shard(0, 3, [], 3), shard(1, 3, ["a", "b"], 3), shard(2, 3, ["c"], 3)]
    return [
        write(folder / f"m-{index + 1:05d}-of-00003.gguf", content)
        for index, content in enumerate(contents)
    ]


def test_shards_open_by_any_file_or_directory(tmp_path: Path) -> None:
    for path in (*shards(tmp_path), tmp_path):
        with GGUFFile.open(path) as file:
            values = {name: file.weight(name).dequantize().tolist() for name in file.tensors}
            assert values == {"a": [1, 0], "b": [1, 1], "c": [2, 0]}


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    paths = shards(tmp_path)
    paths[1].unlink()
    for path in (paths[0], tmp_path):
        with pytest.raises(SchemeError, match=r"missing m-00002-of-00003\.gguf"):
            GGUFFile.open(path)


@pytest.mark.parametrize(
    ("index", "content", "found"),
    [
        (1, shard(2, 3, ["a", "b"], 3), "split.no 2 of split.count 3"),
        (1, shard(1, 4, ["a", "b"], 3), "split.no 1 of split.count 4"),
        (2, shard(2, 3, ["d", "c"], 3), "the shards hold 4 tensors"),
        (2, shard(2, 3, ["a"], 3), "'a' is also in"),
        (1, gguf(), "split.no 0 of split.count 1"),
    ],
    ids=["place", "count", "total", "twice", "no-keys"],
)
def test_shards_that_disagree(tmp_path: Path, index: int, content: bytes, found: str) -> None:
    path = write(shards(tmp_path)[index], content)
    with pytest.raises(SchemeError, match=found):
        GGUFFile.open(path)


def test_renamed_shard_and_crowded_directory(tmp_path: Path) -> None:
    lonely = shards(tmp_path)[1].rename(tmp_path / "renamed.gguf")
    with pytest.raises(SchemeError, match=r"split.no 1 of split.count 3"):
        GGUFFile.open(lonely)
    with pytest.raises(SchemeError, match=r"it holds m-00001-of-00003.gguf, renamed.gguf"):
        GGUFFile.open(tmp_path)
    with pytest.raises(SchemeError, match="shard 9 of 3"):
        GGUFFile.open(write(tmp_path / "n-00009-of-00003.gguf", gguf()))


def test_a_large_vocabulary_opens_fast(tmp_path: Path) -> None:
    count = 262_144
    strings = b"".join(text(f"token{index}") for index in range(count))
    tokens = key("tokens", ARRAY, struct.pack("<IQ", STRING, count) + strings)
    path = write(tmp_path / "m.gguf", gguf([tokens]))
    start = time.perf_counter()
    with GGUFFile.open(path) as file:
        assert time.perf_counter() - start < 1
        tokens_found = file.metadata["tokens"]
        assert isinstance(tokens_found, list)
        assert (len(tokens_found), tokens_found[-1]) == (count, "token262143")


def test_forgotten_metadata_gives_its_pages_back_and_is_read_again(tmp_path: Path) -> None:
    strings = b"".join(text(f"token{index}") for index in range(262_144))
    tokens = key("tokens", ARRAY, struct.pack("<IQ", STRING, 262_144) + strings)
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("needs /proc to count resident pages")

    def mapped() -> int:
        return int(status.read_text().split("RssFile:")[1].split()[0]) << 10

    with GGUFFile.open(write(tmp_path / "m.gguf", gguf([tokens]))) as file:
        found, before = file.metadata["tokens"], mapped()
        file.metadata.forget()
        assert before - mapped() > len(strings) // 2
        assert file.metadata["tokens"] == found
