"""Folders with a few changed bytes or settings: read in full or refused, never anything else."""

from __future__ import annotations

import json
import random
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.pack_awq import Awq, awq
from support.pack_compressed import Compressed, int_quantized, pack_quantized
from support.pack_float import fp8, nvfp4
from support.pack_gptq import Gptq, auto_round_config, gptq
from support.packers import Packed, write_folder

import qcompile
from qcompile.errors import QCompileError

KINDS: dict[str, Callable[[], Packed]] = {
    "gptq": lambda: gptq(32, 64, Gptq(4, 32, order="permuted", bias=True)),
    "gptq3": lambda: gptq(32, 64, Gptq(3, -1, True)),
    "awq": lambda: awq(32, 64, Awq(32)),
    "gemv": lambda: awq(32, 64, Awq(32, version="gemv")),
    "auto_round": lambda: gptq(32, 64, Gptq(4, 32, zeros="v2")),
    "pack": lambda: pack_quantized(32, 64, Compressed(4, 32, symmetric=False, actorder="group")),
    "int": lambda: int_quantized(32, 64, Compressed(8, -1, symmetric=False)),
    "fp8": lambda: fp8(32, 64, "block", (16, 32)),
    "nvfp4": lambda: nvfp4(32, 64),
}
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 3, 4, 8, 32, 1 << 40, 1 << 70, 0.5, -0.0, 1e308, "", "4", "gptq",
    "int", "\0", "../x", [], [[]], [4], {}, {"bits": 8}, {"": {}}, "re:(", "-:(",
]  # fmt: skip
ROUNDS = 60


def folder_of(tmp_path: Path, kind: str) -> Path:
    layer = KINDS[kind]()
    config = auto_round_config("auto_round", Gptq(4, 32)) if kind == "auto_round" else None
    return write_folder(tmp_path / "model", {"0": layer}, config)


def read_or_refuse(folder: Path, note: object) -> None:
    """Everything that is listed can be read in its own shape, or one error says why not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            checkpoint = qcompile.open(folder)
            for name, weight in checkpoint.tensors.items():
                assert checkpoint.dequantize(name).shape == weight.shape, note
        except QCompileError as error:
            assert all((error.where, error.found, error.needed, error.fix)), note  # noqa: PT017
        except Exception as error:
            pytest.fail(f"{type(error).__name__}: {error} after {note}")


@pytest.mark.parametrize("kind", KINDS)
def test_changed_bytes_of_the_header(tmp_path: Path, kind: str) -> None:
    folder = folder_of(tmp_path, kind)
    path = folder / "model.safetensors"
    good = path.read_bytes()
    (size,) = struct.unpack("<Q", good[:8])
    draw = random.Random(kind)
    for turn in range(ROUNDS):
        content = bytearray(good)
        for _ in range(draw.choice((1, 1, 2, 5))):
            place = draw.randrange(8 + size)
            content[place] = draw.choice(
                (draw.randrange(256), ord(draw.choice('0123456789,[]{}":')))
            )
        path.write_bytes(bytes(content))
        read_or_refuse(folder, (turn, bytes(content[: 8 + size])))


@pytest.mark.parametrize("kind", KINDS)
def test_changed_bytes_of_the_config(tmp_path: Path, kind: str) -> None:
    folder = folder_of(tmp_path, kind)
    path = folder / "config.json"
    good = path.read_bytes()
    draw = random.Random(kind)
    for turn in range(ROUNDS):
        content = bytearray(good)
        for _ in range(draw.choice((1, 1, 2, 5))):
            content[draw.randrange(len(content))] = draw.choice(
                (draw.randrange(256), 48, 57, 45, 34)
            )
        path.write_bytes(bytes(content))
        read_or_refuse(folder, (turn, bytes(content)))


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place of a JSON tree."""
    found = [path] if path else []
    items = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    for key, value in items:
        found += places(value, (*path, key))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_other_settings(tmp_path: Path, kind: str) -> None:
    """One value after another is replaced by each of many that have no business there."""
    folder = folder_of(tmp_path, kind)
    path = folder / "config.json"
    good = path.read_text(encoding="utf-8")
    for place in places(json.loads(good)):
        for value in VALUES:
            tree = json.loads(good)
            node = tree
            for key in place[:-1]:
                node = node[key]
            node[place[-1]] = value
            path.write_text(json.dumps(tree), encoding="utf-8")
            read_or_refuse(folder, (place, value))


@pytest.mark.parametrize("kind", KINDS)
def test_changed_bytes_of_the_tensors(tmp_path: Path, kind: str) -> None:
    """Codes and scales may be anything; indices and shapes may not."""
    folder = folder_of(tmp_path, kind)
    path = folder / "model.safetensors"
    good = path.read_bytes()
    (size,) = struct.unpack("<Q", good[:8])
    draw = random.Random(kind)
    for turn in range(ROUNDS):
        content = bytearray(good)
        for _ in range(draw.choice((1, 20, 400))):
            content[draw.randrange(8 + size, len(content))] = draw.randrange(256)
        path.write_bytes(bytes(content))
        read_or_refuse(folder, turn)
