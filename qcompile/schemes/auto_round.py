"""The ``auto_round`` scheme: tensors of other schemes under AutoRound's own settings.

Comes in: a folder. Goes out: an open checkpoint.
Always holds: ``packing_format`` says whose tensors they are; ``extra_config`` names modules that
differ, and holds only the keys that do.

==================================== ==========================================
packing format                       tensors
==================================== ==========================================
``auto_round:auto_gptq``             GPTQ v1: zero points are stored minus one
``auto_round``, ``auto_round:gptqmodel`` GPTQ v2: zero points as they are
``auto_round:auto_awq``              AWQ gemm
``auto_round:llm_compressor``        compressed-tensors, ``pack-quantized``
==================================== ==========================================
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from qcompile.errors import SchemeError
from qcompile.schemes.awq import modules as awq
from qcompile.schemes.compressed_tensors import groups as ct_groups
from qcompile.schemes.compressed_tensors import modules as ct
from qcompile.schemes.folder.checkpoint import FolderCheckpoint
from qcompile.schemes.folder.claim import claims_folder, open_folder
from qcompile.schemes.folder.settings import Settings
from qcompile.schemes.folder.stored import StoredTensor
from qcompile.schemes.gptq import modules as gptq
from qcompile.schemes.gptq.rules import Rule as GPTQRule
from qcompile.weight import WeightRef

METHODS = ("auto_round", "intel/auto_round")
_FORMATS = (
    "auto_round",
    "auto_round:gptqmodel",
    "auto_round:auto_gptq",
    "auto_round:auto_awq",
    "auto_round:llm_compressor",
)
_PER_MODULE = ("bits", "group_size", "sym", "data_type")
_ACTIVATIONS = ("act_bits", "act_group_size", "act_sym", "act_data_type", "act_dynamic")
_READ = (
    *_PER_MODULE,
    *_ACTIVATIONS,
    "packing_format",
    "quant_method",
    "extra_config",
    "super_bits",
    "super_group_size",
)
# Keys that steer how the tool searched or loads, not what the tensors mean.
_HARMLESS = (
    "autoround_version",
    "block_name_to_quantize",
    "to_quant_block_names",
    "backend",
    "iters",
    "nsamples",
    "seqlen",
    "batch_size",
    "lr",
    "minmax_lr",
    "gradient_accumulate_steps",
    "amp",
    "enable_minmax_tuning",
    "enable_norm_bias_tuning",
    "enable_quanted_input",
    "low_gpu_mem_usage",
    "low_cpu_mem_usage",
    "quant_lm_head",
    "scale_dtype",
    "dataset",
    "damp_percent",
    "desc_act",
    "true_sequential",
    "static_groups",
    "model_free",
)
_DENSE = 16  # bits from which on a module is stored as floats
Rule = TypeVar("Rule")
_SPECIAL = re.compile(r"[\\^$*+?{}\[\]|()]")


@dataclass(frozen=True)
class Choice:
    """What the settings say of one module."""

    bits: int
    group: int
    sym: bool
    origin: str


@dataclass(frozen=True)
class AutoRoundScheme:
    """Folders whose ``quant_method`` is ``auto-round``."""

    name: str = "auto_round"

    def claims(self, path: Path) -> bool:
        """Whether the folder's settings name the method."""
        return claims_folder(path, METHODS)

    def open(self, path: Path) -> FolderCheckpoint:
        """Read settings, headers and group indices."""
        settings, stored = open_folder(path, self.name, METHODS)
        harmless = settings.check_keys(_READ, _HARMLESS)
        notes = (f"settings that do not matter here: {', '.join(harmless)}",) if harmless else ()
        weights, used = _read(settings, stored)
        return FolderCheckpoint(path, self.name, settings, stored, weights, used, notes)


def _read(
    settings: Settings, stored: Mapping[str, StoredTensor]
) -> tuple[dict[str, WeightRef], set[str]]:
    _refuse_what_is_not_read(settings)
    packing = str(settings.one_of("packing_format", _FORMATS, "auto_round:auto_gptq"))
    choice_of = read_choices(settings)
    if packing == "auto_round:auto_awq":
        return awq.read_modules(stored, _mapped(choice_of, _awq(settings)))
    if packing == "auto_round:llm_compressor":
        return ct.read_modules(stored, _mapped(choice_of, _ct), ())
    zeros_as_stored = packing != "auto_round:auto_gptq"

    def rule(choice: Choice) -> GPTQRule:
        zeros = "stored" if zeros_as_stored else "field"
        return GPTQRule(choice.bits, choice.group, choice.sym, False, zeros, choice.origin)  # type: ignore[arg-type]

    return gptq.read_modules(stored, _mapped(choice_of, rule))


def _refuse_what_is_not_read(settings: Settings) -> None:
    settings.refuse("data_type", ("int",), "other types are not stored in these tensors")
    settings.refuse("act_bits", range(_DENSE, 33), "quantized activations are not supported here")
    for key in ("super_bits", "super_group_size"):
        settings.refuse(key, (), "scales of two levels are stored in GGUF files only")


def read_choices(settings: Settings) -> Callable[[str], Choice | None]:
    """What the settings say of a module; None where it is stored as floats.

    A key of ``extra_config`` that is a module's name decides; else, among the keys that are
    patterns, the first that matches the whole name, then the first that matches a part of it.

    Raises:
        SchemeError: a setting that is missing, of a wrong type or without meaning.
    """
    base = _choice(settings, None, "by the base settings")
    extra = settings.get("extra_config", dict, {})
    exact: dict[str, Choice] = {}
    patterns: list[tuple[re.Pattern[str], Choice]] = []
    for key, content in extra.items():
        where = f"{settings.where}: extra_config: {key}"
        if not isinstance(content, dict):
            raise SchemeError(where, f"{content!r}", "an object", "correct the file")
        inner = Settings(where, content)
        inner.check_keys((*_PER_MODULE, *_ACTIVATIONS), _HARMLESS)
        choice = _choice(inner, base, f"by extra_config {key!r}")
        if choice.bits < _DENSE:
            _refuse_what_is_not_read(inner)
        exact[key] = choice
        if _SPECIAL.search(key):
            patterns.append((_compiled(key, where), choice))

    def choice_of(module: str) -> Choice | None:
        found = exact.get(module)
        for match in (re.Pattern.fullmatch, re.Pattern.search):
            if found is None:
                found = next((c for pattern, c in patterns if match(pattern, module)), None)
        found = found or base
        return None if found.bits >= _DENSE else found

    return choice_of


def _choice(settings: Settings, base: Choice | None, origin: str) -> Choice:
    bits = settings.need("bits", int) if base is None else settings.get("bits", int, base.bits)
    if bits not in (*range(2, 9), _DENSE, 2 * _DENSE):
        raise SchemeError(f"{settings.where}: bits", f"{bits}", "2 to 8, or 16", "correct the file")
    group = settings.group_size(None if base is None else base.group)
    return Choice(
        bits, group, settings.get("sym", bool, True if base is None else base.sym), origin
    )


def _compiled(key: str, where: str) -> re.Pattern[str]:
    try:
        return re.compile(key)
    except re.error as error:
        raise SchemeError(
            where, f"no regular expression: {error}", "a name or a pattern", "correct it"
        ) from None


def _mapped(
    choice_of: Callable[[str], Choice | None], make: Callable[[Choice], Rule]
) -> Callable[[str], Rule | None]:
    """The same choices as rules of the scheme whose tensors they describe."""

    def rule_of(module: str) -> Rule | None:
        choice = choice_of(module)
        return None if choice is None else make(choice)

    return rule_of


def _awq(settings: Settings) -> Callable[[Choice], awq.Rule]:
    def rule(choice: Choice) -> awq.Rule:
        if choice.bits != 4:
            raise SchemeError(
                f"{settings.where}: bits",
                f"{choice.bits} ({choice.origin})",
                "4: AWQ packs no other width",
                "convert the checkpoint to another packing format",
            )
        return awq.Rule(choice.group, choice.sym, "gemm", choice.origin)

    return rule


def _ct(choice: Choice) -> ct_groups.Group:
    strategy = "channel" if choice.group == -1 else "group"
    return ct_groups.Group(
        choice.origin, "packed", choice.bits, strategy, choice.group, None, choice.sym, None
    )


SCHEME = AutoRoundScheme()
