"""The Hugging Face configuration of a GGUF file.

Comes in: an open file. Goes out: a ``PretrainedConfig`` of the class for its architecture, and the
settings of a generation. Always holds: no value is the class's own default where the file states
another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qcompile.hf import need_transformers
from qcompile.schemes.gguf.reader import GGUFFile
from qcompile.schemes.gguf.values import read_configuration

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig


def build_config(file: GGUFFile) -> PretrainedConfig:
    """The configuration of the file's model.

    Frequencies of a rotary embedding that the file lists and no configuration can express are kept
    in the attribute ``qcompile_rope_divisors``, which ``qcompile.hf.build_skeleton`` applies.

    Raises:
        SchemeError: the architecture is unknown or its metadata cannot be followed exactly.
        OptionError: transformers is not installed.
    """
    transformers = need_transformers("build_config")
    found = read_configuration(file)
    return transformers.AutoConfig.for_model(found.architecture.model_type, **found.values)


def build_generation_config(file: GGUFFile) -> GenerationConfig:
    """The settings with which ``generate`` starts: special tokens and where to stop.

    Raises:
        SchemeError, OptionError: as for ``build_config``.
    """
    transformers = need_transformers("build_generation_config")
    found = read_configuration(file)
    stops = list(found.stops)
    return transformers.GenerationConfig(
        bos_token_id=found.values["bos_token_id"],
        pad_token_id=found.values["pad_token_id"],
        eos_token_id=stops if len(stops) > 1 else next(iter(stops), None),
    )
