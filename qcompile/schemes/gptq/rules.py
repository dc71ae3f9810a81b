"""What a GPTQ configuration says of one module.

Comes in: settings, the name of a module. Goes out: bits, group and zero-point rule, or None for a
module that is not quantized.
Always holds: ``dynamic`` has GPTQModel's meaning: patterns that exclude are asked first, then the
others in the order of the file, the first that matches the start of the name decides; names are the
checkpoint's, before any fusing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from qcompile.errors import SchemeError
from qcompile.schemes.folder.settings import Settings
from qcompile.schemes.gptq.zeros import ZeroRule

BITS = (2, 3, 4, 8)
_READ = (
    "bits",
    "group_size",
    "sym",
    "desc_act",
    "dynamic",
    "checkpoint_format",
    "format",
    "quant_method",
    "method",
    "pack_dtype",
    "meta",
    "lm_head",
    "is_marlin_format",
)
# Keys that steer how a tool searched or loads, not what the tensors mean.
_HARMLESS = (
    "damp_percent",
    "damp_auto_increment",
    "true_sequential",
    "static_groups",
    "mse",
    "act_group_aware",
    "model_name_or_path",
    "model_file_base_name",
    "modules_in_block_to_quantize",
    "block_name_to_quantize",
    "module_name_preceding_first_block",
    "modules_to_not_convert",
    "dataset",
    "tokenizer",
    "batch_size",
    "pad_token_id",
    "model_seqlen",
    "max_input_length",
    "cache_block_outputs",
    "use_cuda_fp16",
    "use_exllama",
    "disable_exllama",
    "exllama_config",
    "backend",
    "device",
    "device_map",
    "adapter",
    "offload_to_disk",
    "offload_to_disk_path",
    "mock_quantization",
    "quantizer",
    "uri",
    "v2",
    "v2_alpha",
)
_OVERRIDES = ("bits", "group_size", "sym", "desc_act", "pack_dtype")
_SEARCH = ("mse", "damp_percent", "damp_auto_increment", "static_groups", "act_group_aware")


@dataclass(frozen=True)
class Rule:
    """How one module is stored.

    Attributes:
        bits: width of a code.
        group: input columns that share a scale; -1 for all of them.
        sym: whether every zero point is ``2**(bits - 1)``.
        desc_act: whether the tool says it changed the order of columns; the index decides.
        zeros: how zero points are stored.
        origin: where the rule stands, for the plan.
    """

    bits: int
    group: int
    sym: bool
    desc_act: bool
    zeros: ZeroRule
    origin: str

    def __str__(self) -> str:
        group = "channel" if self.group == -1 else f"g{self.group}"
        kind = "sym" if self.sym else "asym"
        version = "v2" if self.zeros == "stored" else "v1"
        return f"{self.bits}-bit {group} {kind} {version}, {self.origin}"


@dataclass(frozen=True)
class Rules:
    """The rule of every module.

    Attributes:
        settings: where they come from.
        base: the rule without exceptions.
        dynamic: patterns and what they change, None to exclude, in the order in which to ask.
        notes: keys that were read and do not matter.
    """

    settings: Settings
    base: Rule
    dynamic: tuple[tuple[str, re.Pattern[str], Mapping[str, object] | None], ...] = ()
    notes: tuple[str, ...] = ()

    def of(self, module: str) -> Rule | None:
        """The rule of a module, None where a pattern excludes it."""
        for text, pattern, changes in self.dynamic:
            if pattern.match(module) is None:
                continue
            if changes is None:
                return None
            return self._changed(text, changes)
        return self.base

    def _changed(self, text: str, changes: Mapping[str, object]) -> Rule:
        inner = Settings(f"{self.settings.where}: dynamic {text!r}", changes)
        inner.check_keys(_OVERRIDES, _SEARCH)
        inner.refuse("pack_dtype", ("int32",), "codes are read from 32-bit words")
        changed = replace(
            self.base,
            bits=_bits(inner, self.base.bits),
            group=inner.group_size(self.base.group),
            sym=inner.get("sym", bool, self.base.sym),
            desc_act=inner.get("desc_act", bool, self.base.desc_act),
            origin=f"by dynamic {text!r}",
        )
        return changed


def read_rules(settings: Settings) -> Rules:
    """The rules of a GPTQ configuration.

    Raises:
        SchemeError: a setting that is missing, unknown, of a wrong type or not supported.
    """
    harmless = settings.check_keys(_READ, _HARMLESS)
    settings.refuse("pack_dtype", ("int32",), "codes are read from 32-bit words")
    settings.refuse("is_marlin_format", (False,), "Marlin's own layout is not a GPTQ checkpoint")
    stored_as = _stored_as(settings)
    bits = _bits(settings, None)
    base = Rule(
        bits,
        settings.group_size(),
        settings.get("sym", bool, True),
        settings.get("desc_act", bool, False),
        "stored" if stored_as == "gptq_v2" else _writer(settings),
        "by the base settings",
    )
    notes = (f"settings that do not matter here: {', '.join(harmless)}",) if harmless else ()
    return Rules(settings, base, _dynamic(settings), notes)


def _stored_as(settings: Settings) -> str:
    """``gptq`` or ``gptq_v2``; tools name it by two keys."""
    known = ("gptq", "gptq_v2")
    named = {
        str(settings.one_of(key, known))
        for key in ("checkpoint_format", "format")
        if settings.values.get(key) is not None
    }
    if len(named) > 1:
        raise SchemeError(
            f"{settings.where}: checkpoint_format and format",
            " and ".join(sorted(named)),
            "one format",
            "correct the file",
        )
    return named.pop() if named else "gptq"


def _bits(settings: Settings, default: int | None) -> int:
    if default is None:
        settings.need("bits", int)
    return int(str(settings.one_of("bits", BITS, default)))


def _writer(settings: Settings) -> ZeroRule:
    """Which kind of writer made a v1 file; see ``zeros.py``."""
    meta = settings.values.get("meta")
    named = meta.get("quantizer") if isinstance(meta, dict) else None
    names = named if isinstance(named, list) else [named]
    return "word" if any(str(name).lower().startswith("gptqmodel") for name in names) else "field"


def _dynamic(
    settings: Settings,
) -> tuple[tuple[str, re.Pattern[str], Mapping[str, object] | None], ...]:
    found = settings.get("dynamic", dict, {})
    rules = []
    for text, changes in found.items():
        where = f"{settings.where}: dynamic {text!r}"
        excludes = text.startswith("-:")
        if not isinstance(changes, dict) and not (excludes and not changes):
            raise SchemeError(where, f"{changes!r}", "an object with settings", "correct the file")
        body = text[2:] if text[:2] in ("-:", "+:") else text
        try:
            pattern = re.compile(body)
        except re.error as error:
            raise SchemeError(
                where, f"no regular expression: {error}", "one that Python reads", "correct it"
            ) from None
        rules.append((text, pattern, None if excludes else changes))
    # Stable: exclusions first, otherwise in the order of the file.
    return tuple(sorted(rules, key=lambda rule: rule[2] is not None))
