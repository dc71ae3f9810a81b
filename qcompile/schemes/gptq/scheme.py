"""The ``gptq`` scheme, as the compiler sees it.

Comes in: a folder. Goes out: an open checkpoint.
Always holds: everything but the group indices of its columns is decided by headers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from qcompile.schemes.folder.checkpoint import FolderCheckpoint
from qcompile.schemes.folder.claim import claims_folder, open_folder
from qcompile.schemes.gptq.modules import read_modules
from qcompile.schemes.gptq.rules import read_rules

METHODS = ("gptq",)


@dataclass(frozen=True)
class GPTQScheme:
    """Folders whose ``quant_method`` is ``gptq``; older ones have a ``quantize_config.json``."""

    name: str = "gptq"

    def claims(self, path: Path) -> bool:
        """Whether the folder's settings name the method."""
        return claims_folder(path, METHODS)

    def open(self, path: Path) -> FolderCheckpoint:
        """Read settings, headers and group indices."""
        settings, stored = open_folder(path, self.name, METHODS)
        rules = read_rules(settings)
        weights, used = read_modules(stored, rules.of)
        notes = rules.notes
        if rules.base.desc_act and not any(name.endswith(".g_idx") for name in stored):
            notes = (*notes, "desc_act, but no g_idx is stored: columns are read in order")
        if settings.get("lm_head", bool, False) and "lm_head.weight" not in weights:
            notes = (*notes, "lm_head is said to be quantized, but no quantized head is stored")
        return FolderCheckpoint(path, self.name, settings, stored, weights, used, notes)


SCHEME = GPTQScheme()
