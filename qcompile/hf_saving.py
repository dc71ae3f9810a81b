"""``save_pretrained`` and its kin on a compiled model of transformers.

Comes in: a compiled model. Goes out: the same model, whose methods write what there is or say why
not. Always holds: quantized weights are written as ``save_checkpoint`` writes them, bit for bit;
nothing is sent anywhere; an argument that is not read is an error.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from torch import nn

from qcompile.errors import OptionError

# What save_pretrained does anyway, by argument.
_AS_IT_IS: dict[str, tuple[object, ...]] = {
    "is_main_process": (True,),
    "safe_serialization": (True, None),
    "push_to_hub": (False, None),
    "save_original_format": (True,),
    "save_peft_format": (True, False),
    "token": (None,),
    "variant": (None,),
    "state_dict": (None,),
    "distributed_checkpoint": (False, None),
}
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def seal_saving(model: nn.Module) -> None:
    """Let ``save_pretrained`` write a GPTQ folder, and refuse what needs floats or a network."""
    name = type(model).__name__
    original: Any = model.save_pretrained

    @functools.wraps(original)
    def save_pretrained(save_directory: str | Path, *args: Any, **kwargs: Any) -> None:
        if getattr(model, "_hf_peft_config_loaded", False):
            original(save_directory, *args, **kwargs)  # writes the adapters alone
            return
        if args:
            raise OptionError(
                f"{name}.save_pretrained",
                f"{len(args)} more arguments without names",
                "the folder, then arguments by name",
                "name them",
            )
        _save(model, save_directory, **kwargs)

    sealed: dict[str, Any] = {
        "save_pretrained": save_pretrained,
        **{method: _refusal(f"{name}.{method}", *why) for method, why in _REFUSED.items()},
        # transformers refuses these by a word of its own, whether or not they change anything.
        "half": functools.partial(nn.Module.half, model),
        "float": functools.partial(nn.Module.float, model),
    }
    for attribute, call in sealed.items():
        object.__setattr__(model, attribute, call)


# What a compiled model cannot do: what was found, what is needed, what to do instead.
_REFUSED = {
    "push_to_hub": (
        "a compiled model is not uploaded",
        "a folder that was looked at first",
        "save_pretrained(folder), then huggingface_hub.upload_folder(folder_path=folder, ...)",
    ),
    "dequantize": (
        "a compiled model keeps no floats to go back to",
        "the checkpoint, which has the quantized weights",
        "qcompile.open(path).dequantize(name) gives one weight in float32",
    ),
    "resize_token_embeddings": (
        "the weights of a compiled model are planned and packed in their shapes",
        "a float model",
        "resize the float model, then quantize and compile it",
    ),
}


def _refusal(where: str, found: str, needed: str, fix: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise OptionError(where, found, needed, fix)

    return refuse


def _save(
    model: nn.Module,
    folder: str | Path,
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
    **given: object,
) -> None:
    from qcompile.writers import save_checkpoint

    if hasattr(model, "peft_config"):
        raise OptionError(
            f"{type(model).__name__}.save_pretrained",
            "adapters are attached, and a checkpoint has no place for them",
            "the adapters and the model in two folders",
            "call save_pretrained of the PEFT model for the adapters; save the model without them",
        )
    for argument, value in given.items():
        if not any(value is allowed for allowed in _AS_IT_IS.get(argument, ())):
            raise OptionError(
                f"save_pretrained(..., {argument}={value!r})",
                "is not read for a compiled model",
                f"the folder, max_shard_size, overwrite, or {', '.join(_AS_IT_IS)} as they are",
                "leave it out, or use qcompile.save_checkpoint",
            )
    save_checkpoint(model, folder, overwrite=overwrite, shard_bytes=_bytes(max_shard_size))


def _bytes(size: int | str) -> int:
    if isinstance(size, int):
        return size
    found = re.fullmatch(r"(\d+)\s*([KMG]I?B|)", str(size).strip().upper())
    if found is None:
        raise OptionError(
            f"max_shard_size={size!r}", "no size", "bytes, or a text such as '5GB'", "pass one"
        )
    return int(found[1]) * _UNITS[found[2]]
