"""A Hugging Face language model as a function of ids, positions and tensors of keys and values.

Comes in: a causal language model. Goes out: a module whose calls write to caches that it is given.
Always holds: every layer keeps all keys up to the context, also where the model looks back over a
window only: the mask, which transformers makes, hides the others; a model that keeps anything else
from step to step is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, CacheLayerMixin

from qcompile.errors import CaptureError

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
        known = inspect.signature(self._plain).parameters
        if not {"input_ids", "position_ids", "cache"} <= set(known):
            raise CaptureError(
                type(model).__name__,
                f"forward takes {', '.join(known)}",
                "input_ids, position_ids and a cache",
                "use qcompile.load for this model",
            )
        self._last = {"logits_to_keep": 1} if "logits_to_keep" in known else {}

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
        other = [k for k, v in vars(layer).items() if _is_state(v) and k not in ("keys", "values")]
        if other or not all(isinstance(x, torch.Tensor) and x.dim() == 4 for x in pair):
            raise CaptureError(
                f"{model}, layer {number} of the cache",
                f"a {type(layer).__name__} with {', '.join(other) or 'no keys and values'}",
                "keys and values [batch, heads, tokens, columns] and nothing else",
                "use qcompile.load for this model: it cannot be exported",
            )
        for x in pair:
            assert isinstance(x, torch.Tensor)
            caches.append(x.new_zeros((1, x.shape[1], context, x.shape[3])))
    return caches


def _is_state(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() > 1


def layers_of(output: Any) -> Sequence[object]:
    """The layers of the cache in a model's output."""
    layers: Sequence[object] | None = getattr(getattr(output, "cache", None), "layers", None)
    return layers or ()
