"""Typed access to the metadata that describes a model.

Comes in: a file's metadata and the prefix of its architecture. Goes out: numbers, flags and texts.
Always holds: a value of the wrong type is a SchemeError that names the key; keys under the prefix
that nobody asked for are known at the end, so none is ignored by accident.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from qcompile.errors import SchemeError

# Keys that say nothing about the computation, with the reason.
IRRELEVANT = {
    "vocab_size": "the rows of token_embd.weight count the vocabulary",
    "tensor_data_layout": "names the layout of the source; the tensors are in llama.cpp's own",
    "rope.scaling.finetuned": "says how the scaling was obtained, not what it is",
}
# Keys of features that the supported models lack, and the value that switches the feature off.
OFF: Mapping[str, tuple[object, ...]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_feed_forward_length": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_shared_count": (0,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_weights_scale": (0.0, 1.0),
    "expert_weights_norm": (False,),
    "leading_dense_block_count": (0,),
    "attention.sliding_window": (0,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "use_parallel_residual": (False,),
    "pooling_type": (0,),
    "logit_scale": (1.0, 0.0),
    "residual_scale": (1.0, 0.0),
    "embedding_scale": (1.0, 0.0),
    "nextn_predict_layers": (0,),
}


class Keys:
    """The metadata keys ``<prefix>.*`` of a file, and which of them were used.

    Args:
        metadata: the file's metadata.
        prefix: the architecture, as the file spells it.
        where: the file, for messages.
    """

    def __init__(self, metadata: Mapping[str, object], prefix: str, where: str) -> None:
        self.where = where
        self._metadata = metadata
        self._prefix = prefix
        self._left = {key for key in metadata if key.startswith(f"{prefix}.")}

    def __contains__(self, key: str) -> bool:
        return f"{self._prefix}.{key}" in self._metadata

    def get(self, key: str) -> object:
        """The raw value, None when the file has no such key."""
        full = f"{self._prefix}.{key}"
        self._left.discard(full)
        return self._metadata.get(full)

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number; a list counts when all of its entries are equal."""
        value = self._uniform(key, self.get(key))
        if value is None:
            return self._default(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(key, value, "a whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number, positive or zero."""
        value = self._uniform(key, self.get(key))
        if value is None:
            return self._default(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.wrong(key, value, "a number")
        if not 0 <= value < float("inf"):
            raise self.wrong(key, value, "a finite number, not negative")
        return _decimal(value)

    def flag(self, key: str, default: bool) -> bool:
        """Yes or no."""
        value = self._uniform(key, self.get(key))
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def text(self, key: str, default: str) -> str:
        """A text."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong(key, value, "a text")
        return value

    def wrong(self, key: str, value: object, needed: str) -> SchemeError:
        """The error for a value that cannot be used."""
        return SchemeError(
            self.where,
            f"{self._prefix}.{key} is {_short(value)}",
            needed,
            "convert the file again, or use a version of qcompile that knows this kind of model",
        )

    def finish(self) -> tuple[str, ...]:
        """The keys that were left unused because they do not matter.

        Raises:
            SchemeError: a key that may change what the model computes was not used.
        """
        ignored = []
        for full in sorted(self._left):
            key = full.removeprefix(f"{self._prefix}.")
            if key in IRRELEVANT:
                ignored.append(f"{full}: {IRRELEVANT[key]}")
                continue
            value = self._uniform(key, self._metadata[full])
            if value not in OFF.get(key, ()):
                off = " or ".join(map(str, OFF.get(key, ())))
                needed = f"{off}, which switches it off" if off else "keys whose meaning is known"
                raise self.wrong(key, value, needed)
            ignored.append(f"{full}: switched off")
        return tuple(ignored)

    def _uniform(self, key: str, value: object) -> object:
        if not isinstance(value, list) or not value:
            return value
        if any(entry != value[0] for entry in value):
            raise self.wrong(key, value, "the same value for every layer")
        return value[0]

    def _default(self, key: str, default: int | float | None) -> int:
        if default is None:
            raise SchemeError(
                self.where,
                f"no metadata key {self._prefix}.{key}",
                "the key, which has no default",
                "convert the file again",
            )
        return default  # type: ignore[return-value]


def _decimal(value: float) -> float:
    """The shortest decimal that is stored as this float32: files hold 1e-6 as 9.99999997e-07."""
    single = struct.unpack("<f", struct.pack("<f", value))[0] if value < 3e38 else value
    short = float(f"{value:.7g}")
    same = single == value and struct.pack("<f", short) == struct.pack("<f", value)
    return short if same else float(value)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
