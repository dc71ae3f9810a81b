"""The Hugging Face model that a folder describes.

Comes in: a folder and the weights in it. Goes out: the model on the meta device, its tokenizer.
Always holds: no code of the folder is run; nothing is fetched; a head that the folder stores is
used, whatever the configuration says of tying.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from qcompile.errors import QCompileError, SchemeError
from qcompile.hf import build_skeleton, need_transformers
from qcompile.schemes.folder.settings import model_config
from qcompile.weight import WeightRef, same_floats

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_HEAD = "lm_head.weight"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def build_model(path: Path, tensors: Mapping[str, WeightRef], dtype: torch.dtype) -> nn.Module:
    """The model of ``config.json``, parameters on the meta device, eval mode.

    Args:
        path: the folder.
        tensors: its weights, which decide whether the head is tied.
        dtype: dtype of the parameters.

    Raises:
        SchemeError: no configuration, one that needs code of the folder, or a missing head.
        OptionError: transformers is not installed.
    """
    content = model_config(path)
    if not content:
        raise SchemeError(
            str(path),
            "no config.json",
            "the configuration of the model",
            "download it too, or build the module and use qcompile.optimize",
        )
    transformers = need_transformers("build_model")
    with _told(path / "config.json", transformers.__version__):
        config = transformers.AutoConfig.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=False
        )
    # Otherwise transformers would ask for the packages of the scheme's own tool.
    for key in ("quantization_config", "compression_config"):
        if hasattr(config, key):
            delattr(config, key)
    settle_head(config, tensors, path)
    architectures = content.get("architectures")
    named = architectures[0] if isinstance(architectures, list) and architectures else None
    with _told(path / "config.json", transformers.__version__):
        model = build_skeleton(config, dtype, named if isinstance(named, str) else None)
    if (path / "generation_config.json").is_file():
        with _told(path / "generation_config.json", transformers.__version__):
            model.generation_config = transformers.GenerationConfig.from_pretrained(
                str(path), local_files_only=True
            )
    return model


def build_tokenizer(path: Path) -> object:
    """The folder's tokenizer, or None where it has none."""
    if not any((path / name).is_file() for name in _TOKENIZERS):
        return None
    transformers = need_transformers("build_tokenizer")
    with _told(path, transformers.__version__, "a tokenizer"):
        return transformers.AutoTokenizer.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=False
        )


@contextlib.contextmanager
def _told(place: Path, version: str, what: str = "a configuration") -> Iterator[None]:
    """Tell whatever transformers raises over a file as an error of the folder."""
    try:
        yield
    except QCompileError:
        raise
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise SchemeError(
            str(place),
            f"transformers cannot use it: {lines[0] if lines else type(error).__name__}",
            f"{what} that transformers {version} takes as it is",
            "correct the file, or build the module and use qcompile.optimize",
        ) from error


def settle_head(config: PretrainedConfig, tensors: Mapping[str, WeightRef], path: Path) -> None:
    """Tie the head exactly where the folder stores none of its own."""
    text = config.get_text_config()
    embedding = next((n for n in tensors if n.endswith("embed_tokens.weight")), None)
    if embedding is None:
        return
    tied = bool(getattr(text, "tie_word_embeddings", False))
    if _HEAD in tensors and tied and not same_floats(tensors[_HEAD], tensors[embedding]):
        text.tie_word_embeddings = config.tie_word_embeddings = False
    architectures = config.architectures or []
    makes_text = any(str(name).endswith("ForCausalLM") for name in architectures)
    if _HEAD not in tensors and not tied and makes_text:
        raise SchemeError(
            str(path),
            f"no {_HEAD}, and config.json does not tie it to {embedding}",
            "a head, or tie_word_embeddings true",
            f"add {_HEAD} to the folder, or set tie_word_embeddings to true in config.json if the "
            "model was trained so",
        )
