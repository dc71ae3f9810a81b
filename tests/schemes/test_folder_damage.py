"""Folders whose files are missing, damaged, foreign or hostile: one SchemeError that says so."""

from __future__ import annotations

import json
import os
import pickle
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.folders import agrees, gptq_pair, pair, refusal, right_or_refused, rows
from support.pack_gptq import Gptq
from support.packers import stored, write_folder, write_index

import qcompile
from qcompile.errors import SchemeError

SHARD = "model-{:05d}-of-00003.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model", gptq_pair())


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model", gptq_pair(), shards=3)


def weight_map(folder: Path) -> dict[str, str]:
    content = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    found: dict[str, str] = content["weight_map"]
    return found


# **** shards ****


def test_shards(sharded: Path) -> None:
    agrees(sharded, pair, gptq_pair(), rows())


def test_shards_that_are_links_into_a_cache(tmp_path: Path, sharded: Path) -> None:
    """The Hugging Face cache: a snapshot of links to blobs outside the folder."""
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for number, path in enumerate(sorted(sharded.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(Path("..", "blobs", str(number)))
    agrees(sharded, pair, gptq_pair(), rows())


def test_a_missing_shard(sharded: Path) -> None:
    (sharded / SHARD.format(2)).unlink()
    refusal(sharded, SHARD.format(2))
    for call in (qcompile.open, qcompile.plan):
        with pytest.raises(SchemeError, match=SHARD.format(2)):
            call(sharded)


@pytest.mark.parametrize("where", ["parent", "absolute", "nested", "link", "windows"])
def test_an_index_that_leaves_the_folder(tmp_path: Path, sharded: Path, where: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    secret = outside / "secret.safetensors"
    (sharded / SHARD.format(2)).rename(secret)
    (sharded / "sub").mkdir()
    (sharded / "link").symlink_to(outside)
    name = {
        "parent": "../outside/secret.safetensors",
        "absolute": str(secret),
        "nested": "sub/../../outside/secret.safetensors",
        "link": "link/secret.safetensors",
        "windows": "..\\outside\\secret.safetensors",
    }[where]
    moved = {n: name if f == SHARD.format(2) else f for n, f in weight_map(sharded).items()}
    write_index(sharded, moved)
    opened = watch()
    error = refusal(sharded)
    assert repr(name)[1:-1] in str(error) or name in str(error)
    assert str(secret) not in opened
    assert not any("secret" in path for path in opened)


def watch() -> list[str]:
    """Paths that Python opens from now on. The hook stays: there is no way to take one back."""
    opened: list[str] = []

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], (str, bytes, os.PathLike)):
            opened.append(os.fsdecode(arguments[0]))

    sys.addaudithook(hook)
    return opened


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {}}',
        '{"weight_map": {"0.qweight": 7}}',
        '{"weight_map": {"0.qweight": ""}}',
        '{"weight_map": {"0.qweight": "."}}',
        '{"weight_map": {"0.qweight": null}}',
        "[" * 100_000,
        "\ufeff\ufffe",
    ],
    ids=lambda text: text[:36] or "empty",
)
def test_a_damaged_index(sharded: Path, content: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(content, encoding="utf-8")
    refusal(sharded, "model.safetensors.index.json")


def test_a_tensor_in_two_shards(sharded: Path) -> None:
    tensors = stored(gptq_pair())
    second = sharded / SHARD.format(2)
    name = next(n for n, shard in weight_map(sharded).items() if shard == SHARD.format(1))
    part = {n: tensors[n] for n, shard in weight_map(sharded).items() if shard == second.name}
    save_file({**part, name: tensors[name] * 2}, second)
    refusal(sharded, name)


def test_a_tensor_that_the_index_promises(sharded: Path) -> None:
    write_index(sharded, {**weight_map(sharded), "0.g_idx": SHARD.format(3)})
    refusal(sharded, "0.g_idx", SHARD.format(3))


def test_a_tensor_that_the_index_forgot(tmp_path: Path) -> None:
    """An order of columns that lies in a shard but not in the index must not be lost."""
    layers = gptq_pair(Gptq(4, 32, order="permuted", bias=True))
    folder = write_folder(tmp_path / "model", layers, shards=3)
    known = weight_map(folder)
    write_index(folder, {n: shard for n, shard in known.items() if n != "0.g_idx"})
    right_or_refused(folder, pair, layers, "0.g_idx")


# **** not safetensors ****

FOREIGN: dict[str, tuple[bytes, str]] = {
    "lfs": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 9\n",
        "git-lfs",
    ),
    "html": (b"<!DOCTYPE html><html><body>Not found</body></html>", "web page"),
    "json": (b'{"error": "Repository not found"}', "model.safetensors"),
    "pickle": (pickle.dumps({"0.qweight": [1, 2]}), "pickle"),
    "zip": (b"PK\3\4" + bytes(60), "pickle"),
    "gguf": (b"GGUF\3\0\0\0" + bytes(40), "GGUF"),
    "empty": (b"", "empty"),
    "short": (b"\1\2\3", "model.safetensors"),
    "absurd header": (struct.pack("<Q", 120 << 20) + b"{}", "model.safetensors"),
    "endless header": (struct.pack("<Q", (1 << 64) - 1) + b"{}", "model.safetensors"),
    "header of another kind": (struct.pack("<Q", 2) + b"[]", "model.safetensors"),
    "header no JSON": (struct.pack("<Q", 8) + b"{nonono}", "model.safetensors"),
    "header bad text": (struct.pack("<Q", 4) + b"\xff\xfe{}", "model.safetensors"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_another_file_under_this_name(folder: Path, kind: str) -> None:
    content, word = FOREIGN[kind]
    (folder / "model.safetensors").write_bytes(content)
    refusal(folder, "model.safetensors", word)


def header(folder: Path) -> tuple[dict[str, Any], bytes]:
    content = (folder / "model.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def write(folder: Path, head: dict[str, Any], data: bytes) -> None:
    text = json.dumps(head).encode()
    content = struct.pack("<Q", len(text)) + text + data
    (folder / "model.safetensors").write_bytes(content)


def test_a_file_that_ends_early(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    for size in (len(content) - 1, len(content) // 2, 100):
        (folder / "model.safetensors").write_bytes(content[:size])
        refusal(folder, "model.safetensors")


def test_bytes_after_the_last_tensor(folder: Path) -> None:
    head, data = header(folder)
    write(folder, head, data + bytes(16))
    refusal(folder, "model.safetensors")


Change = Callable[[dict[str, Any]], None]
CHANGES: dict[str, Change] = {
    "offsets outside": lambda entry: entry.update(data_offsets=[1 << 40, (1 << 40) + 8192]),
    "negative offsets": lambda entry: entry.update(data_offsets=[-2048, 0]),
    "offsets swapped": lambda entry: entry.update(data_offsets=entry["data_offsets"][::-1]),
    "shape too large": lambda entry: entry.update(shape=[1 << 31, 1 << 33]),
    "shape negative": lambda entry: entry.update(shape=[-8, -64]),
    "shape of text": lambda entry: entry.update(shape=["8", "64"]),
    "no shape": lambda entry: entry.pop("shape"),
    "unknown dtype": lambda entry: entry.update(dtype="I33"),
    "no offsets": lambda entry: entry.pop("data_offsets"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_damaged_header(folder: Path, kind: str) -> None:
    head, data = header(folder)
    CHANGES[kind](head["0.qweight"])
    write(folder, head, data)
    refusal(folder, "model.safetensors")


def test_tensors_that_share_bytes(folder: Path) -> None:
    head, data = header(folder)
    head["0.scales"]["data_offsets"] = head["1.scales"]["data_offsets"]
    head["0.scales"]["shape"] = head["1.scales"]["shape"]
    write(folder, head, data)
    refusal(folder, "model.safetensors")


# **** pickles ****


class Marker:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch '{self.path}'",))


def replaced(folder: Path, name: str, content: Any, kind: str) -> None:
    """Put a pickle in the place of the safetensors file, as torch wrote it or without torch."""
    (folder / "model.safetensors").unlink()
    if kind == "raw":
        (folder / name).write_bytes(pickle.dumps(content))
    else:
        torch.save(content, folder / name, _use_new_zipfile_serialization=kind == "zip")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.safetensors"])
@pytest.mark.parametrize("kind", ["raw", "old", "zip"])
def test_a_pickle_that_runs_code(tmp_path: Path, folder: Path, name: str, kind: str) -> None:
    marker = tmp_path / "marker"
    content = {**stored(gptq_pair()), "payload": Marker(marker)}
    replaced(folder, name, content, kind)
    refusal(folder)
    assert not marker.exists()
    for call in (qcompile.open, qcompile.plan, qcompile.load):
        with pytest.raises(SchemeError):
            call(folder)
    assert not marker.exists()


def test_a_good_pytorch_file(folder: Path) -> None:
    """Loaded with weights_only: tensors and nothing else."""
    replaced(folder, "pytorch_model.bin", stored(gptq_pair()), "zip")
    agrees(folder, pair, gptq_pair(), rows())


def test_a_pytorch_file_older_than_zip(folder: Path) -> None:
    replaced(folder, "pytorch_model.bin", stored(gptq_pair()), "old")
    right_or_refused(folder, pair, gptq_pair(), "pytorch_model.bin")


def test_a_pickle_beside_safetensors_is_left_alone(tmp_path: Path, folder: Path) -> None:
    marker = tmp_path / "marker"
    torch.save({"0.qweight": Marker(marker)}, folder / "pytorch_model.bin")
    agrees(folder, pair, gptq_pair(), rows())
    assert not marker.exists()


def test_a_folder_without_tensors(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    refusal(folder, "config.json")
