"""How a float model is to be quantized.

Comes in: what a user passed to ``optimize``. Goes out: ``Settings``, or an OptionError.
Always holds: an unknown name, a value of a wrong type and an option that the chosen quantizer does
not have are refused by name, before the model is looked at.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

import torch

from qcompile.errors import OptionError, nearest
from qcompile.quantizers.grid import SCALE
from qcompile.spec import AffineSpec

QUANTIZERS = ("rtn", "gptq")
BITS = (2, 3, 4, 5, 6, 7, 8)
USUAL_GROUPS = (-1, 16, 32, 64, 128)

# One batch: what the model is called with. A mapping is keyword arguments, a list positional ones.
Batch = Mapping[str, Any] | torch.Tensor | tuple[Any, ...] | list[Any]


class Options(TypedDict, total=False):
    """The options of ``optimize`` for float models.

    Attributes:
        bits: width of a code, 2 to 8 (4).
        group_size: columns that share a scale, -1 for all of them (128).
        sym: whether the zero is the middle code (False for ``rtn``, True for ``gptq``).
        lm_head: whether the output head is quantized too (False).
        skip: regular expressions of modules that stay in float.
        search: for ``rtn``: whether each group takes the closest of some grids (True), or the one
            from its smallest to its largest value.
        calibration: for ``gptq``: batches of inputs, each what ``forward`` takes: a tensor, a tuple
            or a mapping of arguments.
        desc_act: for ``gptq``: the columns with the largest inputs first (False).
        static_groups: for ``gptq``: groups fitted to the original weight (False).
        damp: for ``gptq``: damping relative to the Hessian's mean diagonal (0.01).
    """

    bits: int
    group_size: int
    sym: bool
    lm_head: bool
    skip: Iterable[str]
    search: bool
    calibration: Iterable[Batch] | Batch | None
    desc_act: bool
    static_groups: bool
    damp: float


_NAMES = tuple(Options.__annotations__)
_GPTQ_ONLY = ("calibration", "desc_act", "static_groups", "damp")


@dataclass(frozen=True)
class Settings:
    """Checked options.

    Attributes:
        method: ``rtn`` or ``gptq``.
        bits: width of a code.
        group_size: columns that share a scale, or -1.
        sym: symmetric grids.
        lm_head: whether the output head is quantized.
        skip: patterns of module paths that stay in float.
        search: whether rounding to nearest takes the closest of some grids.
        batches: calibration data; empty means rounding to nearest.
        desc_act: treat the columns with the largest inputs first.
        static_groups: fit groups to the original weight.
        damp: relative damping.
    """

    method: str
    bits: int = 4
    group_size: int = 128
    sym: bool = True
    lm_head: bool = False
    skip: tuple[re.Pattern[str], ...] = ()
    search: bool = False
    batches: tuple[Batch, ...] = ()
    desc_act: bool = False
    static_groups: bool = False
    damp: float = 0.01

    def spec(self, columns: int) -> AffineSpec:
        """The spec of a weight with this many columns."""
        group = columns if self.group_size == -1 else min(self.group_size, columns)
        permuted = self.desc_act and not self.static_groups and group < columns
        form = "symmetric" if self.sym else "zero"
        order = "permuted" if permuted else "sequential"
        return AffineSpec(self.bits, group, form, SCALE, order)  # type: ignore[arg-type]


def settings_for(method: str, options: Mapping[str, object]) -> Settings:
    """Check the options of a quantizer.

    Raises:
        OptionError: see above.
    """
    if method not in QUANTIZERS:
        raise OptionError(
            f"scheme={method!r}",
            "quantizes no float model",
            f"one of {', '.join(QUANTIZERS)}, or a checkpoint",
            f"name a quantizer{nearest(str(method), QUANTIZERS)}",
        )
    check_names(options)
    for name in _GPTQ_ONLY:
        given = options.get(name)
        if method != "gptq" and given is not None and given is not False:
            raise _misplaced(f"{name}=", f'scheme="{method}"', 'scheme="gptq"')
    if method != "rtn" and options.get("search"):
        raise _misplaced("search=", f'scheme="{method}"', 'scheme="rtn"')
    batches = _batches(options.get("calibration"))
    for name in ("desc_act", "static_groups", "damp"):
        if not batches and options.get(name):
            raise _misplaced(f"{name}=", "no calibration data", "calibration=[batch, ...]")
    return Settings(
        method,
        _one_of("bits", options.get("bits", 4), BITS),
        _group(options.get("group_size", 128)),
        _flag("sym", options.get("sym", method == "gptq")),
        _flag("lm_head", options.get("lm_head", False)),
        _patterns(options.get("skip", ())),
        _flag("search", options.get("search", method == "rtn")),
        batches,
        _flag("desc_act", options.get("desc_act", False)),
        _flag("static_groups", options.get("static_groups", False)),
        _damp(options.get("damp", 0.01)),
    )


def check_names(options: Mapping[str, object]) -> None:
    """Raise OptionError for a name that ``optimize`` does not know."""
    for name in options:
        if name not in _NAMES:
            raise OptionError(
                f"optimize({name}=...)",
                "unknown option",
                f"an argument of optimize, or one of {', '.join(_NAMES)}",
                f"correct the name{nearest(name, _NAMES)}",
            )


def refuse_options(options: Mapping[str, object], where: str) -> None:
    """Raise OptionError when options that quantize a float model came where there is none."""
    check_names(options)
    for name in options:
        raise OptionError(
            f"{name}=",
            f"has no meaning with {where}",
            f"a float model and scheme={' or '.join(map(repr, QUANTIZERS))}",
            f"leave {name} out, or leave checkpoint out to quantize the module's own weights",
        )


# **** single options ****


def _misplaced(what: str, found: str, needed: str) -> OptionError:
    return OptionError(what, f"has no meaning with {found}", needed, f"leave {what[:-1]} out")


def _one_of(name: str, value: object, allowed: tuple[int, ...]) -> int:
    if type(value) is int and value in allowed:
        return value
    raise OptionError(
        f"{name}={value!r}",
        f"a {type(value).__name__}" if type(value) is not int else "not supported",
        f"one of {', '.join(map(str, allowed))}",
        "name one of them",
    )


def _group(value: object) -> int:
    if type(value) is int and (value == -1 or value > 0):
        return value
    raise OptionError(
        f"group_size={value!r}",
        f"a {type(value).__name__}" if type(value) is not int else "no number of columns",
        f"-1 for whole rows, or a positive number; usual are {', '.join(map(str, USUAL_GROUPS))}",
        "name one of them",
    )


def _flag(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise OptionError(f"{name}={value!r}", f"a {type(value).__name__}", "True or False", "pass one")


def _damp(value: object) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1:
        return float(value)
    raise OptionError(f"damp={value!r}", "no damping", "a number between 0 and 1", "pass 0.01")


def _patterns(value: object) -> tuple[re.Pattern[str], ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise OptionError(
            f"skip={value!r}",
            f"a {type(value).__name__}",
            "a list of regular expressions",
            f"pass skip=[{value!r}]",
        )
    return tuple(_pattern(text) for text in value)


def _pattern(text: object) -> re.Pattern[str]:
    try:
        return re.compile(text)  # type: ignore[call-overload, no-any-return]
    except (re.error, TypeError) as error:
        raise OptionError(
            f"skip=[{text!r}]", f"no regular expression: {error}", "a valid one", "correct it"
        ) from None


def _batches(value: object) -> tuple[Batch, ...]:
    if value is None:
        return ()
    if isinstance(value, (torch.Tensor, Mapping)):
        return (value,)
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise _no_batch(value)
    batches = tuple(value)
    if not batches:
        raise OptionError(
            "calibration", "no batch in it", "at least one", "leave it out to round to nearest"
        )
    for batch in batches:
        if not isinstance(batch, (torch.Tensor, Mapping, tuple, list)):
            raise _no_batch(batch)
    return batches


def _no_batch(value: object) -> OptionError:
    return OptionError(
        "calibration",
        f"a {type(value).__name__}",
        "batches: tensors, mappings of keyword arguments, or lists of positional ones",
        "tokenize the texts first: calibration=[tokenizer(text, return_tensors='pt'), ...]",
    )
