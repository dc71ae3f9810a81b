"""The ``awq`` scheme, as the compiler sees it.

Comes in: a folder. Goes out: an open checkpoint.
Always holds: the version that the settings name is followed or refused, never guessed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from qcompile.errors import SchemeError
from qcompile.schemes.awq.modules import Rule, read_modules
from qcompile.schemes.folder.checkpoint import FolderCheckpoint
from qcompile.schemes.folder.claim import claims_folder, open_folder
from qcompile.schemes.folder.settings import Settings

METHODS = ("awq",)
_READ = (
    "quant_method",
    "method",
    "bits",
    "group_size",
    "zero_point",
    "sym",
    "version",
    "format",
    "checkpoint_format",
    "modules_to_not_convert",
    "pack_dtype",
    "desc_act",
    "dynamic",
)
_HARMLESS = (
    "backend",
    "do_fuse",
    "fuse_max_seq_len",
    "modules_to_fuse",
    "exllama_config",
    "lm_head",
    "meta",
    "model_name_or_path",
    "model_file_base_name",
    "damp_percent",
    "true_sequential",
    "static_groups",
    "uri",
)


@dataclass(frozen=True)
class AWQScheme:
    """Folders whose ``quant_method`` is ``awq``, and those of AutoAWQ without one."""

    name: str = "awq"

    def claims(self, path: Path) -> bool:
        """Whether the folder's settings name the method."""
        return claims_folder(path, METHODS)

    def open(self, path: Path) -> FolderCheckpoint:
        """Read settings and headers."""
        settings, stored = open_folder(path, self.name, METHODS)
        rule_of, notes = read_rules(settings)
        weights, used = read_modules(stored, rule_of)
        return FolderCheckpoint(path, self.name, settings, stored, weights, used, notes)


def read_rules(settings: Settings) -> tuple[Callable[[str], Rule | None], tuple[str, ...]]:
    """The rule of a module, and what does not matter.

    Raises:
        SchemeError: a setting that is missing, unknown, of a wrong type or not supported.
    """
    harmless = settings.check_keys(_READ, _HARMLESS)
    settings.refuse("pack_dtype", ("int32",), "codes are read from 32-bit words")
    settings.refuse("desc_act", (False,), "AWQ does not change the order of columns")
    settings.refuse("dynamic", ({},), "rules for single modules are not known for AWQ")
    settings.need("bits", int)
    settings.one_of("bits", (4,))
    version, sym = _version(settings), not _asymmetric(settings)
    rule = Rule(settings.group_size(), sym, version, "by the base settings")
    skipped = settings.get("modules_to_not_convert", list, [])

    def rule_of(module: str) -> Rule | None:
        return None if any(_names(str(entry), module) for entry in skipped) else rule

    notes = (f"settings that do not matter here: {', '.join(harmless)}",) if harmless else ()
    return rule_of, notes


def _asymmetric(settings: Settings) -> bool:
    if settings.values.get("zero_point") is None:
        return not settings.get("sym", bool, False)
    return settings.get("zero_point", bool, True)


def _version(settings: Settings) -> Literal["gemm", "gemv"]:
    """``gemm`` or ``gemv``; tools name it by three different keys."""
    named = [settings.values.get(key) for key in ("version", "checkpoint_format", "format")]
    found = {str(value).lower() or "an empty text" for value in named if value is not None}
    found = found or {"gemm"}
    if len(found) > 1 or not found <= {"gemm", "gemv"}:
        raise SchemeError(
            f"{settings.where}: version",
            " and ".join(sorted(found)),
            "gemm or gemv",
            "convert the checkpoint with AutoAWQ or GPTQModel to version gemm",
        )
    return "gemv" if "gemv" in found else "gemm"


def _names(entry: str, module: str) -> bool:
    """Whether an entry of the skip list names a module: a run of whole components of its path."""
    wanted, path = entry.split("."), module.split(".")
    return any(path[at : at + len(wanted)] == wanted for at in range(len(path) - len(wanted) + 1))


SCHEME = AWQScheme()
