"""A Hugging Face language model as a function of ids, positions and tensors of keys and values.

Comes in: a causal language model. Goes out: a module whose calls write to caches that it is given.
Always holds: every layer keeps all keys up to the context, also where the model looks back over a
window only: the mask, which transformers makes, hides the others; a model that keeps anything else
from step to step is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, CacheLayerMixin

from qcompile.errors import CaptureError, OptionError

_FIX = "use qcompile.load for this model: it cannot be exported"
KeysValues = tuple[torch.Tensor, torch.Tensor]


class _Layer(CacheLayerMixin):  # type: ignore[misc] # transformers is not typed
    """Keys and values of one layer, ``[1, H, context, D]``, written at given positions."""

    is_compileable = True
    is_sliding = False

    def __init__(self, kept: KeysValues, positions: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values = kept
        self.positions, self.is_initialized = positions, True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """The tensors are there from the beginning."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> KeysValues:
        """Write the new rows; all rows."""
        self.keys.index_copy_(2, self.positions, key_states)
        self.values.index_copy_(2, self.positions, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many keys a mask covers, and where the first of them is."""
        return self.keys.shape[2], 0

    def get_seq_length(self) -> Any:
        """How many tokens were read before; a tensor, so that the graph holds for every number."""
        return self.positions[0]

    def get_max_length(self) -> int:
        """How many tokens there is room for."""
        return self.keys.shape[2]


class Step(nn.Module):
    """Logits of the last of some tokens, and their keys and values in the caches.

    Args:
        model: a causal language model, not compiled or compiled by ``qcompile``.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        # The class's own: an instance may hold a compiled one.
        self._plain: Any = type(model).forward
        self._last = {"logits_to_keep": 1} if "logits_to_keep" in check_forward(model) else {}

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, caches: list[torch.Tensor]
    ) -> torch.Tensor:
        """Read some tokens.

        Args:
            ids: int64 ``[1, T]``.
            positions: int64 ``[T]``, consecutive; tokens before the first were read already.
            caches: keys and values of every layer in turn, each ``[1, H, context, D]``; changed.

        Returns:
            logits ``[1, 1, V]`` of the last token.
        """
        pairs = zip(caches[::2], caches[1::2], strict=True)
        kept = Cache(layers=[_Layer(pair, positions) for pair in pairs])
        given = {"cache": kept, "position_ids": positions[None], "use_cache": True}
        found: torch.Tensor = self._plain(self.model, input_ids=ids, **given, **self._last).logits
        return found[:, -1:]


def check_forward(model: nn.Module) -> Collection[str]:
    """The names of what a model's forward takes.

    Raises:
        CaptureError: it is not that of a language model of transformers.
    """
    known = inspect.signature(type(model).forward).parameters
    if not {"input_ids", "position_ids", "cache"} <= set(known) or not hasattr(model, "config"):
        raise CaptureError(
            type(model).__name__,
            f"forward takes {', '.join(name for name in known if name != 'self')}",
            "a language model of transformers: input_ids, position_ids and a cache",
            _FIX,
        )
    return known


def check_context(model: nn.Module, context: int) -> None:
    """Raise OptionError for a context in which the keys of a text are not what they were.

    Where ``longrope`` turns from short factors to long ones, all keys of a prompt are turned by the
    long ones; a prompt that is read in parts, or a text that grows, has keys of both kinds.
    """
    config: Any = model.config
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    for rope in (parameters, *(v for v in parameters.values() if isinstance(v, Mapping))):
        limit = rope.get("original_max_position_embeddings")
        if rope.get("rope_type") == "longrope" and limit is not None and context > limit:
            raise OptionError(
                f"context={context}",
                f"the rotary embedding of {type(model).__name__} is another one beyond {limit}",
                f"{limit} or fewer",
                f"pass context={limit}, or use qcompile.load for longer texts",
            )


def empty_caches(kept: Sequence[object], context: int, model: str) -> list[torch.Tensor]:
    """Caches of a model's layers for a context, as ``Step`` takes them.

    Args:
        kept: the layers of the cache that a call of the model filled.
        context: tokens to make room for.
        model: its name, for messages.

    Raises:
        CaptureError: a layer keeps something else than keys and values.
    """
    caches: list[torch.Tensor] = []
    for number, layer in enumerate(kept):
        pair = [getattr(layer, name, None) for name in ("keys", "values")]
        other = [name for name in _states(layer) if name not in ("keys", "values")]
        if other or not all(isinstance(x, torch.Tensor) and x.dim() == 4 for x in pair):
            raise CaptureError(
                f"{model}, layer {number} of the cache",
                f"a {type(layer).__name__} with {', '.join(other) or 'no keys and values'}",
                "keys and values [batch, heads, tokens, columns] and nothing else",
                _FIX,
            )
        for x in pair:
            assert isinstance(x, torch.Tensor)
            caches.append(x.new_zeros((1, x.shape[1], context, x.shape[3])))
    return caches


def layers_of(output: Any, model: str) -> Sequence[object]:
    """The layers of the cache in a model's output.

    Args:
        output: what the model returned.
        model: its name, for messages.

    Raises:
        CaptureError: there is none, or it keeps something beside its layers.
    """
    cache = getattr(output, "cache", None)
    layers: Sequence[object] = getattr(cache, "layers", None) or ()
    other = list(_states(cache))
    if not layers or other or not isinstance(getattr(output, "logits", None), torch.Tensor):
        raise CaptureError(
            model,
            f"it keeps {', '.join(other)}" if other else "it returned no keys and values",
            "a causal language model that keeps them, and nothing else, from token to token",
            _FIX,
        )
    return layers


def _states(owner: object) -> Iterator[str]:
    """Attributes that are tensors of more than one number, or hold such."""
    for name, value in vars(owner).items() if hasattr(owner, "__dict__") else ():
        parts = value.values() if isinstance(value, Mapping) else value
        several = parts if isinstance(value, (Mapping, list, tuple, set)) else (value,)
        if any(isinstance(part, torch.Tensor) and part.numel() > 1 for part in several):
            yield name
