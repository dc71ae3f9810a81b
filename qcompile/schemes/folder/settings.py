"""The JSON files of a checkpoint folder.

Comes in: a folder. Goes out: the model's configuration and the settings of its quantization.
Always holds: a value is used only when its type is right; two files that state the same setting
agree; a setting that nobody reads is told or refused, never dropped in silence.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

from qcompile.errors import SchemeError

_OWN_FILES = ("quantize_config.json", "quantization_config.json", "quant_config.json")
# Keys of config.json, outermost first, under which tools put the settings.
_IN_CONFIG = ("quantization_config", "compression_config")
_NESTED = ("text_config", "llm_config", "language_config")
# What tools write into these may differ from file to file without a meaning.
_FREE = ("meta", "model_name_or_path", "model_file_base_name", "autoround_version")
# What AutoAWQ calls them in its own file.
_ALIASES = {"w_bit": "bits", "q_group_size": "group_size"}
Value = TypeVar("Value")


def read_json(path: Path) -> dict[str, object]:
    """The object in a JSON file. Raises SchemeError when there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SchemeError(
            str(path), f"cannot be read as JSON: {error}", "a JSON object", "download it again"
        ) from None
    if not isinstance(content, dict):
        raise SchemeError(
            str(path), f"a JSON {type(content).__name__}", "a JSON object", "download it again"
        )
    return content


@dataclass(frozen=True)
class Settings:
    """Settings of a quantization, and the file they come from.

    Attributes:
        where: file (and key) for messages.
        values: the settings as stored.
    """

    where: str
    values: Mapping[str, object]

    def get(self, key: str, kind: type[Value], default: Value) -> Value:
        """A setting, or ``default`` when it is absent or null. Raises SchemeError on its type."""
        found = self.values.get(key)
        if found is None:
            return default
        # A bool is an int to Python, but not to a reader of a configuration.
        if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
            raise SchemeError(
                f"{self.where}: {key}",
                f"{found!r}",
                f"a value of type {kind.__name__}",
                "correct the file",
            )
        return found

    def need(self, key: str, kind: type[Value]) -> Value:
        """A setting that has to be there."""
        found = self.values.get(key)
        if found is None:
            raise SchemeError(
                self.where, f"no {key}", f"the setting {key}", "download the file again"
            )
        return self.get(key, kind, cast(Value, found))

    def group_size(self, default: int | None = None) -> int:
        """The columns that share a scale, -1 for all; without a default it has to be there."""
        if default is None:
            self.need("group_size", int)
        size = self.get("group_size", int, -1 if default is None else default)
        if size != -1 and size < 1:
            raise SchemeError(
                f"{self.where}: group_size",
                f"{size}",
                "-1 or a positive number",
                "correct the file",
            )
        return size

    def one_of(self, key: str, allowed: Collection[object], default: object = None) -> object:
        """A setting that has to be one of a few values."""
        found = self.values.get(key, default)
        found = default if found is None else found
        # 4.0 and True are equal to numbers, but are not what a file should say.
        if not any(type(value) is type(found) and value == found for value in allowed):
            raise SchemeError(
                f"{self.where}: {key}",
                f"{found!r}",
                f"one of {', '.join(map(str, allowed))}",
                "convert the checkpoint with its own tool",
            )
        return found

    def refuse(self, key: str, allowed: Iterable[object], why: str) -> None:
        """Raise SchemeError unless a setting is absent, null or one of ``allowed``."""
        found = self.values.get(key)
        if found is not None and found not in tuple(allowed):
            raise SchemeError(
                f"{self.where}: {key}",
                f"{found!r}",
                f"one of {', '.join(map(repr, allowed))}: {why}",
                "convert the checkpoint with its own tool",
            )

    def check_keys(self, read: Collection[str], harmless: Collection[str]) -> tuple[str, ...]:
        """The keys that are there and do not matter.

        Args:
            read: keys that the scheme reads.
            harmless: keys that are known not to change what a weight means.

        Raises:
            SchemeError: a key that is neither and says something.
        """
        unknown = [
            key
            for key, value in self.values.items()
            if key not in read and key not in harmless and value not in (None, False, "", [], {})
        ]
        if unknown:
            raise SchemeError(
                f"{self.where}: {unknown[0]}",
                f"the setting {unknown[0]} = {self.values[unknown[0]]!r} is not known",
                "settings whose meaning is known, since any could change the weights",
                "remove the key if it does not, or use a newer qcompile",
            )
        return tuple(key for key in self.values if key in harmless)


def model_config(folder: Path) -> dict[str, object]:
    """``config.json``, or nothing where there is none."""
    path = folder / "config.json"
    return read_json(path) if path.is_file() else {}


def quantization(folder: Path) -> Settings | None:
    """The settings of the quantization, or None where the folder has none.

    Raises:
        SchemeError: a file is damaged, or two files contradict each other.
    """
    found = list(_sources(folder))
    if not found:
        return None
    first = found[0]
    values = dict(first.values)
    for other in found[1:]:
        for key in other.values:
            if key not in _FREE and _differ(values.get(key), other.values[key]):
                raise SchemeError(
                    f"{first.where} and {other.where}",
                    f"{key} is {values[key]!r} in the one and {other.values[key]!r} in the other",
                    "two files that agree",
                    "keep the one that was written with the tensors",
                )
            if values.get(key) is None:  # null says nothing
                values[key] = other.values[key]
    return Settings(first.where, values)


def method_of(settings: Settings) -> str:
    """The quantization method, in lower case with underscores; recognised in files without one."""
    key = "quant_method" if settings.values.get("quant_method") is not None else "method"
    named = settings.get(key, str, "")
    if named:
        return named.lower().replace("-", "_")
    keys = settings.values.keys()
    version = str(settings.values.get("version")).lower()
    if version in ("gemm", "gemv") or "zero_point" in keys:
        return "awq"
    if "config_groups" in keys:
        return "compressed_tensors"
    return "gptq" if "bits" in keys and ("desc_act" in keys or "group_size" in keys) else "unknown"


def _sources(folder: Path) -> Iterable[Settings]:
    config, path = model_config(folder), folder / "config.json"
    places: list[tuple[Mapping[str, object], str]] = [(config, str(path))]
    for name in _NESTED:
        inner = config.get(name)
        if isinstance(inner, dict):
            places.append((inner, f"{path}: {name}"))
    for content, where in places:
        for key in _IN_CONFIG:
            found = content.get(key)
            if isinstance(found, dict) and found:
                yield Settings(f"{where}: {key}", _by_usual_names(found, where))
    for name in _OWN_FILES:
        if (folder / name).is_file():
            own = str(folder / name)
            yield Settings(own, _by_usual_names(read_json(folder / name), own))


def _by_usual_names(values: Mapping[str, object], where: str) -> Mapping[str, object]:
    renamed: dict[str, object] = {}
    for key, value in values.items():
        usual = _ALIASES.get(key, key)
        if usual in renamed and _differ(renamed[usual], value):
            raise SchemeError(
                f"{where}: {key}",
                f"{value!r}, and {usual} is {renamed[usual]!r}",
                "one value under both names",
                "correct the file",
            )
        renamed[usual] = value
    return renamed


def _differ(one: object, other: object) -> bool:
    if isinstance(one, str) and isinstance(other, str):
        return one.lower() != other.lower()  # AutoAWQ writes GEMM in one file, gemm in the other
    return one is not None and other is not None and one != other
