"""Models with plain float weights, which compiled ones are compared with.

Comes in: a checkpoint, or a folder of float weights. Goes out: a Hugging Face model and its
tokenizer. Always holds: no kernel, pass or packed layout of the compiler has a part in them; of a
checkpoint's weights only the decoder of the stored layout is used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from qcompile.bench.workers.hf_model import logits_of as logits_of
from qcompile.bench.workers.hf_model import text_tokens as text_tokens
from qcompile.conv1d import quantized_conv1d
from qcompile.errors import OptionError, SchemeError
from qcompile.hf import need_transformers
from qcompile.prepare import catalogue_of
from qcompile.schemes import Checkpoint, names, open_checkpoint, scheme_of


def decoded_model(checkpoint: Checkpoint, dtype: torch.dtype) -> tuple[nn.Module, Any]:
    """The model with weights of ``dtype``, not compiled, and its tokenizer."""
    model, tokenizer = checkpoint.build(dtype)
    with quantized_conv1d(model, checkpoint.tensors):
        catalogue = catalogue_of(checkpoint, model)
    for name, weight in catalogue.items():
        path, _, key = name.rpartition(".")
        owner, values = model.get_submodule(path), weight.dequantize().to(dtype)
        weight.release()
        if key in owner._buffers:
            owner._buffers[key] = values
        else:
            setattr(owner, key, nn.Parameter(values, requires_grad=False))
    model.tie_weights()  # type: ignore[operator]
    return model.eval(), tokenizer


def float_model(path: str) -> tuple[nn.Module, Any]:
    """A model in float32 and its tokenizer, from a checkpoint or from a folder of float weights.

    Raises:
        OptionError: there is nothing at the path, or transformers is not installed.
        SchemeError: it cannot be loaded.
    """
    place = Path(path).expanduser()
    if not place.exists():
        raise OptionError(
            path, "no such file or folder", "a model's folder or file", "check the path"
        )
    if any(scheme_of(name).claims(place) for name in names()):
        return decoded_model(open_checkpoint(place), torch.float32)
    transformers = need_transformers(path)
    shown = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            place, dtype=torch.float32, local_files_only=True
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(place, local_files_only=True)
    except (OSError, ValueError) as error:
        raise SchemeError(
            path,
            f"transformers cannot load it: {(str(error).splitlines() or ['?'])[0]}",
            "the folder of a causal language model and its tokenizer",
            "name another folder",
        ) from error
    finally:
        if shown:
            transformers.utils.logging.enable_progress_bar()
    return model.eval(), tokenizer
