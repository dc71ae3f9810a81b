"""Hugging Face models without their weights.

Comes in: a configuration. Goes out: the model with its parameters on the meta device.
Always holds: transformers is imported only when a model is asked for; buffers, which no checkpoint
holds, have their values; parameters have none.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from qcompile.errors import OptionError, SchemeError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Attribute of a configuration: numbers that divide the frequencies of its rotary embedding, one for
# each pair of columns. A checkpoint may have these numbers without the formula behind them.
FREQUENCY_DIVISORS = "qcompile_rope_divisors"


def need_transformers(where: str) -> Any:
    """The module ``transformers``. Raises OptionError when it, or accelerate, is not installed."""
    try:
        importlib.import_module("accelerate")
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise OptionError(
            where,
            f"the package {error.name} is not installed",
            "transformers and accelerate, to build the model a checkpoint describes",
            'pip install "qcompile[hf]"',
        ) from error


def build_skeleton(
    config: PretrainedConfig, dtype: torch.dtype, architecture: str | None = None
) -> nn.Module:
    """A model whose parameters are on the meta device.

    Args:
        config: its configuration.
        dtype: dtype of the parameters.
        architecture: name of its class in transformers; the causal language model of the
            configuration when None.

    Returns:
        the model in eval mode, tied where its configuration ties, without gradients.

    Raises:
        OptionError: transformers or accelerate is not installed.
        SchemeError: transformers has no class of this name.
    """
    transformers = need_transformers("build_skeleton")
    from accelerate import init_empty_weights

    make = transformers.AutoModelForCausalLM.from_config
    if architecture is not None:
        if not hasattr(transformers, architecture):
            raise SchemeError(
                "config.json: architectures",
                f"{architecture}",
                f"a class of transformers {transformers.__version__}",
                "build the module and use qcompile.optimize",
            )
        made = getattr(transformers, architecture)
        if made.config_class is not None and not isinstance(config, made.config_class):
            raise SchemeError(
                "config.json",
                f"model_type {config.model_type!r} with the architecture {architecture}",
                f"a configuration of the class {made.config_class.__name__}",
                "correct the file",
            )
        make = made._from_config
    with init_empty_weights(include_buffers=False):
        model: nn.Module = make(config, dtype=dtype)
    model.tie_weights()  # type: ignore[operator]
    divisors = getattr(config, FREQUENCY_DIVISORS, None)
    if divisors is not None:
        _divide_frequencies(model, divisors)
    return model.eval().requires_grad_(False)


def _divide_frequencies(model: nn.Module, divisors: list[float]) -> None:
    """Divide the rotary embedding's frequencies, as llama.cpp does with ``rope_freqs``."""
    changed = 0
    for name, buffer in model.named_buffers():
        if not name.endswith(("inv_freq", "original_inv_freq")):
            continue
        if buffer.shape != (len(divisors),):
            raise SchemeError(
                name,
                f"{tuple(buffer.shape)} frequencies",
                f"{len(divisors)}, as many as the checkpoint has factors",
                "use a checkpoint that was made from this model",
            )
        buffer.div_(torch.tensor(divisors, dtype=buffer.dtype))
        changed += 1
    if not changed:
        raise SchemeError(
            type(model).__name__,
            "no rotary frequencies",
            "a model with a buffer inv_freq, because the checkpoint changes them",
            "use a checkpoint that was made from this model",
        )
