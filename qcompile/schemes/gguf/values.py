"""A model's configuration values, from a file's metadata.

Comes in: an open file. Goes out: Hugging Face's names and values, without importing transformers.
Always holds: every value is the file's own or a default that an entry names; a key that may change
the computation is used or refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from qcompile.errors import SchemeError
from qcompile.schemes.gguf.architectures import architecture_of
from qcompile.schemes.gguf.entries import VALUES, Architecture, Value
from qcompile.schemes.gguf.keys import Keys
from qcompile.schemes.gguf.latent import latent_values
from qcompile.schemes.gguf.reader import GGUFFile
from qcompile.schemes.gguf.rope import rope_values
from qcompile.schemes.gguf.routing import mixture_values

_TOKENS = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}
# Tokens that end a turn or a message; generation stops at each of them.
_STOPS = (
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.eom_token_id",
)


@dataclass(frozen=True)
class Configuration:
    """What a file's metadata says about its model.

    Attributes:
        architecture: the entry of the architecture.
        values: Hugging Face's configuration, name and value.
        stops: ids of the tokens that end a generation.
        ignored: metadata keys that do not matter, one line each.
    """

    architecture: Architecture
    values: Mapping[str, object]
    stops: tuple[int, ...]
    ignored: tuple[str, ...]


def read_configuration(file: GGUFFile) -> Configuration:
    """Read the configuration of an open file.

    Raises:
        SchemeError: the architecture is unknown, a needed key is missing or has a wrong type, or
            a key may change the computation in a way that the Hugging Face model cannot follow.
    """
    name, where = file.metadata.get("general.architecture"), str(file.path)
    architecture = architecture_of(Keys(file.metadata, str(name), where), name)
    keys = Keys(file.metadata, str(name), where)

    values: dict[str, object] = dict(architecture.constants)
    for value in (*VALUES, *architecture.values):
        values[value.config] = _read(keys, value)
    if architecture.latent:
        values |= latent_values(keys, values)
    else:
        values |= _attention(architecture, keys, values)
    if architecture.mixture is not None:
        values |= mixture_values(architecture, keys, values)
    values["vocab_size"] = vocabulary = _vocabulary(file)
    values["tie_word_embeddings"] = "output.weight" not in file.tensors
    for config, tensor in architecture.biases:
        values[config] = tensor in file.tensors
    values |= rope_values(architecture, file, keys, values)
    for config, key in _TOKENS.items():
        values[config] = _token(file, key, vocabulary)
    stops = [_token(file, key, vocabulary) for key in _STOPS]
    found = tuple(dict.fromkeys(stop for stop in stops if stop is not None))
    return Configuration(architecture, values, found, keys.finish())


def _read(keys: Keys, value: Value) -> int | float | None:
    if value.type == "float":
        number: int | float = keys.number(value.key, value.default)
    else:
        default = None if value.default is None else int(value.default)
        number = keys.integer(value.key, default)
        if number < 1 and number != value.off:
            raise keys.wrong(value.key, number, "a positive number")
    return None if number == value.off else number


def _attention(
    architecture: Architecture, keys: Keys, values: Mapping[str, object]
) -> dict[str, object]:
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    layers = values["num_hidden_layers"]
    assert isinstance(hidden, int)
    assert isinstance(heads, int)
    assert isinstance(layers, int)
    # Absent means a key head for each query head: llama.cpp's loader.
    groups = keys.integer("attention.head_count_kv", heads)
    head = keys.integer("attention.key_length", hidden // heads)
    if groups < 1 or heads % groups:
        raise keys.wrong("attention.head_count_kv", groups, f"a divisor of {heads} heads")
    if head < 2 or head % 2:
        raise keys.wrong("attention.key_length", head, "an even number")
    width = keys.integer("attention.value_length", head)
    if width != head:
        raise keys.wrong("attention.value_length", width, f"{head}, the length of a key")
    found: dict[str, object] = {"num_key_value_heads": groups, "head_dim": head}
    if architecture.sliding_every is not None:
        found["layer_types"] = _layer_types(keys, architecture.sliding_every, layers)
    if architecture.wide_layers is not None:
        wide = layers == architecture.wide_layers
        found["query_pre_attn_scalar"] = _scalar(keys, hidden // heads if wide else head)
    elif "attention.scale" in keys:
        scale = keys.number("attention.scale")
        if abs(scale * head**0.5 - 1) > 1e-6:
            raise keys.wrong("attention.scale", scale, f"{head}**-0.5, or no such key")
    return found


def _layer_types(keys: Keys, every: int, layers: int) -> list[str]:
    """Which layers attend globally: a list of flags (true for sliding), or every how many."""
    key = "attention.sliding_window_pattern"
    pattern = keys.get(key)
    if pattern is None:
        pattern = every
    if isinstance(pattern, list):
        if len(pattern) != layers or not all(isinstance(flag, bool) for flag in pattern):
            raise keys.wrong(key, pattern, f"{layers} flags")
        sliding = [bool(flag) for flag in pattern]
    elif isinstance(pattern, int) and not isinstance(pattern, bool) and pattern > 0:
        sliding = [bool((layer + 1) % pattern) for layer in range(layers)]
    else:
        raise keys.wrong(key, pattern, "a positive number or a flag for each layer")
    return ["sliding_attention" if flag else "full_attention" for flag in sliding]


def _scalar(keys: Keys, default: int) -> int:
    """Gemma divides queries by the square root of this whole number."""
    if "attention.scale" not in keys:
        return default
    scale = keys.number("attention.scale")
    scalar = round(scale**-2) if scale > 0 else 0
    if scalar < 1 or abs(scale * scalar**0.5 - 1) > 1e-6:
        raise keys.wrong("attention.scale", scale, "one over the root of a whole number")
    return scalar


def _vocabulary(file: GGUFFile) -> int:
    info = file.tensors.get("token_embd.weight")
    if info is None or len(info.shape) != 2:
        raise SchemeError(
            str(file.path),
            "no matrix token_embd.weight",
            "the embedding of the vocabulary",
            "use a file that holds a whole language model",
        )
    return int(info.shape[0])


def _token(file: GGUFFile, key: str, vocabulary: int) -> int | None:
    value = file.metadata.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocabulary:
        raise SchemeError(
            str(file.path),
            f"{key} is {value!r}",
            f"a token from 0 to {vocabulary - 1}",
            "convert the file again",
        )
    return value
