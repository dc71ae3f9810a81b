"""Arguments of the public calls, checked before anything is done with them.

Comes in: what a user passed. Goes out: the same, in the form the compiler works with.
Always holds: an argument of a wrong type or without meaning is an OptionError that names it; none
is passed over silently.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import nn

from qcompile.errors import OptionError, SchemeError, nearest
from qcompile.layout import Shape
from qcompile.schemes import Checkpoint, open_checkpoint

POLICIES = ("error", "dequantize", "requantize")
EMULATIONS = (False, True, "float32")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_module(model: object) -> None:
    """Raise OptionError unless ``model`` is a module."""
    if not isinstance(model, nn.Module):
        raise OptionError(
            f"model={model!r}",
            f"a {type(model).__name__}",
            "a torch.nn.Module",
            "pass a module, or use qcompile.load for a checkpoint's own model",
        )
    lazy = [name for name, p in model.named_parameters() if nn.parameter.is_lazy(p)]
    if lazy:
        raise OptionError(
            type(model).__name__,
            f"{lazy[0]} has no shape yet",
            "parameters with shapes",
            "call the module once with an example first",
        )


def check_dtype(dtype: object) -> None:
    """Raise OptionError unless ``dtype`` is None or one that activations may have."""
    if dtype is not None and dtype not in DTYPES:
        raise OptionError(
            f"dtype={dtype!r}",
            "not a dtype of activations",
            f"one of {', '.join(map(str, DTYPES))}, or None",
            "name one of them",
        )


def check_emulation(emulate: object) -> None:
    """Raise OptionError unless ``emulate`` is a value of that argument."""
    if emulate not in EMULATIONS:
        raise OptionError(
            f"emulate={emulate!r}",
            "unknown",
            f"one of {', '.join(map(repr, EMULATIONS))}",
            "name one of them",
        )


def check_policy(policy: object) -> None:
    """Raise OptionError unless ``policy`` is a value of ``on_unsupported``."""
    if policy not in POLICIES:
        raise OptionError(
            f"on_unsupported={policy!r}",
            "unknown policy",
            f"one of {', '.join(POLICIES)}",
            f"name a known policy{nearest(str(policy), POLICIES)}",
        )


def opened_checkpoint(checkpoint: str | Path | Checkpoint | None, scheme: str) -> Checkpoint:
    """An open checkpoint, from a path or from what ``qcompile.open`` returned."""
    if isinstance(checkpoint, (str, Path)):
        return open_checkpoint(checkpoint, scheme)
    if checkpoint is not None and hasattr(checkpoint, "catalogue"):
        if scheme not in ("auto", checkpoint.scheme):
            raise OptionError(
                f"scheme={scheme!r}",
                f"the checkpoint was opened as {checkpoint.scheme}",
                f"auto or {checkpoint.scheme}",
                "leave scheme out",
            )
        return checkpoint
    raise OptionError(
        f"checkpoint={checkpoint!r}",
        "no checkpoint",
        "the path of one, or what qcompile.open returned",
        'pass checkpoint="model.gguf"',
    )


def check_keep(keep: object) -> list[str]:
    """The expressions as a list. Raises OptionError unless they are texts that compile."""
    if isinstance(keep, str):
        raise OptionError(
            f"keep={keep!r}", "one text", "a list of regular expressions", f"pass [{keep!r}]"
        )
    if not isinstance(keep, Iterable):
        raise OptionError(
            f"keep={keep!r}",
            f"a {type(keep).__name__}",
            "a list of regular expressions",
            "pass a list, or leave keep out",
        )
    texts = list(keep)
    for text in texts:
        if not isinstance(text, str):
            raise OptionError(
                f"keep=[{text!r}]", f"a {type(text).__name__}", "regular expressions", "pass texts"
            )
        _pattern(text)
    return texts


def kept_names(model: nn.Module, shapes: Mapping[str, Shape], keep: Iterable[str]) -> list[str]:
    """The parameters that the regular expressions of ``keep`` name.

    Raises:
        OptionError: not a list of expressions, an expression that is not one, or that names no
            parameter.
        SchemeError: a kept parameter has no values.
    """
    kept: dict[str, None] = {}
    for text in check_keep(keep):
        found = [name for name in shapes if _pattern(text).fullmatch(name)]
        if not found:
            raise OptionError(
                f"keep={text!r}",
                "matches no parameter in full",
                f"a pattern for names such as {', '.join(list(shapes)[:3])}",
                f"correct it{nearest(text, shapes)}",
            )
        kept.update(dict.fromkeys(found))
    for name in kept:
        if model.get_parameter(name).is_meta:
            raise SchemeError(
                name,
                "is on the meta device and keep names it",
                "a parameter with values",
                "leave it out of keep, or give it values first",
            )
    return list(kept)


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise OptionError(
            f"keep={text!r}", f"no regular expression: {error}", "a valid one", "correct it"
        ) from None
