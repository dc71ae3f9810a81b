"""Compiled models as checkpoints that other tools read.

Comes in: a model that ``optimize`` or ``load`` returned. Goes out: a folder of the Hugging Face
kind. Always holds: quantized weights keep their values bit for bit, everything else is written as
the model has it; a folder is written as a whole or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from qcompile.errors import OptionError, nearest
from qcompile.session import Session
from qcompile.spec import is_quantized
from qcompile.weight import WeightRef
from qcompile.writers.folder import Unit, new_folder, write_json, write_shards
from qcompile.writers.gptq import (
    FORMATS,
    Format,
    check_zeros,
    module_of,
    settings_of,
    unit_of,
)

_SHARD = 5_000_000_000


def save_checkpoint(
    model: nn.Module,
    path: str | Path,
    format: Format | None = None,
    *,
    tokenizer: Any = None,
    overwrite: bool = False,
    shard_bytes: int = _SHARD,
) -> Path:
    """Write a compiled model as a checkpoint folder.

    Args:
        model: what ``optimize`` or ``load`` returned. Its weights are affine with a symmetric or an
            integer zero; every other tensor is written as it is.
        path: the folder to make.
        format: ``gptq`` stores zero points minus one: most readers know it. ``gptq_v2`` stores them
            as they are: for asymmetric weights. None takes ``gptq`` when every weight is symmetric.
        tokenizer: written too, by its own ``save_pretrained``.
        overwrite: whether a folder that is not empty may be replaced, with all that is in it.
        shard_bytes: size of a file, beyond which a further one is begun.

    Returns:
        the folder.

    Raises:
        OptionError: the model is not compiled, a weight has no form in this format, or the folder
            is not empty.
    """
    if format is not None and format not in FORMATS:
        raise OptionError(
            f"format={format!r}",
            "unknown",
            f"one of {', '.join(FORMATS)}",
            f"name a known format{nearest(str(format), FORMATS)}",
        )
    if type(shard_bytes) is not int or shard_bytes < 1:
        raise OptionError(f"shard_bytes={shard_bytes!r}", "no size", "bytes", "pass a number")
    weights = _quantized(model)
    modules = [module_of(name.removesuffix(".weight"), w) for name, w in weights.items()]
    format = format or (
        "gptq" if all(module.spec.form == "symmetric" for module in modules) else "gptq_v2"
    )
    check_zeros(modules, format)
    head = _head(model)
    settings = settings_of(modules, format, _float_linears(model, weights), head, _version())
    units = [unit_of(module, format) for module in modules] + _float_units(model, weights)
    with new_folder(path, overwrite) as folder:
        _write_config(model, folder, settings)
        write_json(folder / "quantize_config.json", settings)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        write_shards(folder, units, shard_bytes)
    return Path(path)


def _quantized(model: nn.Module) -> dict[str, WeightRef]:
    """The quantized weights of a compiled model, all of them linears'."""
    session = getattr(model, "qcompile", None)
    if not isinstance(session, Session):
        raise OptionError(
            type(model).__name__,
            "was not compiled by qcompile",
            "a model that optimize or load returned",
            'quantize it first: qcompile.optimize(model, scheme="rtn", bits=4)',
        )
    found = {name: w for name, w in session.catalogue.items() if is_quantized(w.spec)}
    for name in found:
        module = model.get_submodule(name.rpartition(".")[0])
        if not isinstance(module, nn.Linear) or not name.endswith(".weight"):
            raise OptionError(
                name,
                f"a quantized parameter of a {type(module).__name__}",
                "weights of linears: embeddings and experts are not written yet",
                "quantize a model without them, or leave them in float (skip, keep)",
            )
    if not found:
        raise OptionError(
            type(model).__name__, "no quantized weight", "at least one", "quantize some module"
        )
    return found


def _float_units(model: nn.Module, weights: Mapping[str, WeightRef]) -> list[Unit]:
    """Every other tensor of the model's state, a shared one once."""
    seen = {id(model.get_parameter(name)) for name in weights}
    units: list[Unit] = []
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) in seen:
            continue
        seen.add(id(value))
        units.append(_float_unit(name, value))
    return units


def _float_unit(name: str, value: torch.Tensor) -> Unit:
    def make() -> Mapping[str, torch.Tensor]:
        # A copy: safetensors refuses tensors that share their storage with others.
        return {name: value.detach().to("cpu", copy=True).contiguous()}

    return Unit(value.nbytes, make)


def _float_linears(model: nn.Module, weights: Mapping[str, WeightRef]) -> list[str]:
    return [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and f"{path}.weight" not in weights
    ]


def _head(model: nn.Module) -> str | None:
    getter = getattr(model, "get_output_embeddings", None)
    head = getter() if callable(getter) else None
    return next((path for path, module in model.named_modules() if module is head), None)


def _write_config(model: nn.Module, folder: Path, settings: Mapping[str, object]) -> None:
    config, place = cast("Any", getattr(model, "config", None)), folder / "config.json"
    content: dict[str, object] = {}
    if hasattr(config, "save_pretrained"):
        config.save_pretrained(folder)
        content = json.loads(place.read_text(encoding="utf-8"))
        generation = cast("Any", getattr(model, "generation_config", None))
        if generation is not None:
            generation.save_pretrained(folder)
    floats = {p.dtype for p in model.parameters() if p.is_floating_point()}
    content["architectures"] = [type(model).__name__]
    if len(floats) == 1:
        content["dtype"] = str(floats.pop()).removeprefix("torch.")
    write_json(place, content | {"quantization_config": dict(settings)})


def _version() -> str:
    from qcompile import __version__

    return __version__
