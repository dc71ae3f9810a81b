"""Which group of settings a module belongs to.

Comes in: the settings of a folder. Goes out: for a module, how its weight is stored, or None.
Always holds: the most particular target wins: a full name, then patterns in the order of the file,
then the class, whatever the order of the groups; ``ignore`` is asked first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from qcompile.errors import SchemeError
from qcompile.schemes.folder.settings import Settings
from qcompile.spec import ActivationSpec

Format = Literal["packed", "int", "float", "nvfp4", "mxfp4"]
_FORMATS: Mapping[str, Format] = {
    "pack-quantized": "packed",
    "int-quantized": "int",
    "float-quantized": "float",
    "mxfp8-quantized": "float",
    "nvfp4-pack-quantized": "nvfp4",
    "mxfp4-pack-quantized": "mxfp4",
}
_READ = (
    "config_groups",
    "format",
    "ignore",
    "kv_cache_scheme",
    "quant_method",
    "sparsity_config",
    "transform_config",
    "version",
)
_HARMLESS = ("global_compression_ratio", "quantization_status")
_GROUP = ("targets", "weights", "input_activations", "output_activations", "format")
_WEIGHTS = (
    "num_bits",
    "type",
    "strategy",
    "group_size",
    "block_structure",
    "symmetric",
    "actorder",
    "dynamic",
)
_SEARCH = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
_ORDERS = ("group", "weight", "static", "dynamic", True)
_STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")


@dataclass(frozen=True)
class Group:
    """How the weights of some modules are stored.

    Attributes:
        name: its key in the file.
        format: which tensors there are.
        bits: width of a code.
        strategy: what shares a scale.
        group: input columns that share a scale; -1 for all of them.
        block: rows and columns that share a scale, strategy ``block`` only.
        sym: whether there are no zero points.
        indexed: whether the group of every column is stored (``actorder`` is ``group``).
        activations: how the input is expected to be quantized, if it is.
        targets: full names, patterns (``re:``) and classes.
    """

    name: str
    format: Format
    bits: int
    strategy: str
    group: int
    block: tuple[int, int] | None
    sym: bool
    activations: ActivationSpec | None
    targets: tuple[str, ...] = ()
    indexed: bool = False

    def __str__(self) -> str:
        size = f"g{self.group}" if self.group != -1 else self.strategy
        kind = "" if self.format not in ("packed", "int") else " sym" if self.sym else " asym"
        return f"{self.bits}-bit {self.format} {size}{kind}, by {self.name}"


@dataclass(frozen=True)
class Groups:
    """The groups of a folder.

    Attributes:
        groups: in the order of the file.
        ignore: targets that are not quantized.
        version: of the tool, as numbers; empty when the file does not say.
        notes: what was read and does not matter.
    """

    groups: tuple[Group, ...]
    ignore: tuple[str, ...]
    version: tuple[int, ...]
    notes: tuple[str, ...]

    def of(self, module: str, kind: str) -> Group | None:
        """The group of a module.

        Args:
            module: its path.
            kind: the name of its class.
        """
        if any(_rank(target, module, kind) is not None for target in self.ignore):
            return None
        ranked = [
            (rank, place, group)
            for place, group in enumerate(self.groups)
            for target in group.targets
            if (rank := _rank(target, module, kind)) is not None
        ]
        return min(ranked, key=lambda found: found[:2])[2] if ranked else None


def _rank(target: str, module: str, kind: str) -> int | None:
    """How particular a target is that names a module: 0 is most; None when it does not."""
    if target == module:
        return 0
    if target.startswith("re:"):
        return 1 if re.match(target[3:], module) else None
    return 2 if target == kind else None


def read_groups(settings: Settings) -> Groups:
    """The groups of a configuration.

    Raises:
        SchemeError: a setting that is missing, unknown, of a wrong type or not supported.
    """
    harmless = settings.check_keys(_READ, _HARMLESS)
    for key, why in (
        ("sparsity_config", "sparse weights are stored without their zeros"),
        ("transform_config", "rotations have to be applied while the model runs"),
    ):
        if settings.values.get(key) and settings.values[key] != {"format": "dense"}:
            raise SchemeError(
                f"{settings.where}: {key}",
                f"{settings.values[key]!r}",
                f"nothing: {why}, which is not supported",
                "convert the checkpoint without it",
            )
    overall = settings.get("format", str, "")
    found = settings.need("config_groups", dict)
    groups = []
    for name, content in found.items():
        where = f"{settings.where}: config_groups: {name}"
        if not isinstance(content, dict):
            raise SchemeError(where, f"{content!r}", "an object", "correct the file")
        groups.append(_group(name, Settings(where, content), overall))
    notes = [f"settings that do not matter here: {', '.join(harmless)}"] if harmless else []
    if settings.values.get("kv_cache_scheme"):
        notes.append("the cache is kept in floats, though the checkpoint has scales for it")
    return Groups(
        tuple(groups),
        _texts(settings, "ignore"),
        tuple(int(part) for part in re.findall(r"\d+", settings.get("version", str, ""))[:2]),
        tuple(notes),
    )


def _group(name: str, settings: Settings, overall: str) -> Group:
    settings.check_keys(_GROUP, ())
    if settings.values.get("output_activations"):
        raise SchemeError(
            f"{settings.where}: output_activations",
            "quantized outputs",
            "none: they are not supported",
            "quantize without them",
        )
    weights = Settings(f"{settings.where}: weights", settings.need("weights", dict))
    weights.check_keys(_WEIGHTS, _SEARCH)
    weights.refuse("dynamic", (False,), "weights with scales computed while the model runs")
    stored = settings.get("format", str, overall)
    if stored not in _FORMATS:
        raise SchemeError(
            f"{settings.where}: format",
            f"{stored!r}",
            f"one of {', '.join(_FORMATS)}",
            "convert the checkpoint to one of these",
        )
    form = _FORMATS[stored]
    integer = form in ("packed", "int")
    weights.one_of("type", ("int",) if integer else ("float",))
    bits = {"nvfp4": (4,), "mxfp4": (4,), "float": (8,)}.get(form, tuple(range(1, 9)))
    strategy = str(weights.one_of("strategy", _STRATEGIES, "tensor"))
    return Group(
        name,
        form,
        int(str(weights.one_of("num_bits", bits))),
        strategy,
        _size(weights, strategy),
        _block(weights, strategy),
        weights.get("symmetric", bool, True),
        _activations(settings),
        _texts(settings, "targets"),
        weights.one_of("actorder", (*_ORDERS, False), False) in ("group", True),
    )


def _size(weights: Settings, strategy: str) -> int:
    if strategy not in ("group", "tensor_group"):
        return -1
    size = weights.need("group_size", int)
    if size < 1:
        raise SchemeError(
            f"{weights.where}: group_size", f"{size}", "a positive number", "correct the file"
        )
    return size


def _block(weights: Settings, strategy: str) -> tuple[int, int] | None:
    if strategy != "block":
        return None
    found = weights.need("block_structure", list)
    if len(found) != 2 or not all(type(x) is int and x > 0 for x in found):
        raise SchemeError(
            f"{weights.where}: block_structure", f"{found!r}", "two positive numbers", "correct it"
        )
    return found[0], found[1]


def _activations(settings: Settings) -> ActivationSpec | None:
    found = settings.get("input_activations", dict, {})
    if not found:
        return None
    inner = Settings(f"{settings.where}: input_activations", found)
    bits = inner.need("num_bits", int)
    if bits == 16:
        return None
    kind = str(inner.one_of("type", ("int", "float"), "int"))
    dtype = {("int", 8): torch.int8, ("float", 8): torch.float8_e4m3fn}.get((kind, bits))
    per = {"token": "token", "tensor": "tensor"}.get(str(inner.values.get("strategy")), "group")
    return ActivationSpec(
        dtype or torch.uint8,
        per,  # type: ignore[arg-type]
        inner.values.get("dynamic") is not False,
        inner.get("symmetric", bool, True),
    )


def _texts(settings: Settings, key: str) -> tuple[str, ...]:
    found: Iterable[object] = settings.get(key, list, [])
    for text in found:
        if not isinstance(text, str):
            raise SchemeError(f"{settings.where}: {key}", f"{text!r}", "texts", "correct the file")
        if text.startswith("re:"):
            _compiles(settings, key, text)
    return tuple(str(text) for text in found)


def _compiles(settings: Settings, key: str, text: str) -> None:
    try:
        re.compile(text[3:])
    except re.error as error:
        raise SchemeError(
            f"{settings.where}: {key}",
            f"{text!r} is no regular expression: {error}",
            "one that Python reads",
            "correct it",
        ) from None
