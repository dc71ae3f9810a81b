"""The ``compressed_tensors`` scheme, as the compiler sees it.

Comes in: a folder. Goes out: an open checkpoint.
Always holds: a module is quantized when its tensors are, and the settings have to agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from qcompile.schemes.compressed_tensors.groups import Group, read_groups
from qcompile.schemes.compressed_tensors.modules import read_modules
from qcompile.schemes.folder.checkpoint import FolderCheckpoint, is_embedding
from qcompile.schemes.folder.claim import claims_folder, open_folder

METHODS = ("compressed_tensors",)


@dataclass(frozen=True)
class CompressedTensorsScheme:
    """Folders whose ``quant_method`` is ``compressed-tensors``."""

    name: str = "compressed_tensors"

    def claims(self, path: Path) -> bool:
        """Whether the folder's settings name the method."""
        return claims_folder(path, METHODS)

    def open(self, path: Path) -> FolderCheckpoint:
        """Read settings, headers, and the shapes and indices stored as tensors."""
        settings, stored = open_folder(path, self.name, METHODS)
        groups = read_groups(settings)

        def group_of(module: str) -> Group | None:
            return groups.of(module, "Embedding" if is_embedding(module) else "Linear")

        weights, used = read_modules(stored, group_of, groups.version)
        return FolderCheckpoint(path, self.name, settings, stored, weights, used, groups.notes)


SCHEME = CompressedTensorsScheme()
