"""A Hugging Face model that is timed inside ``generate``.

Comes in: a model and its tokenizer, however they were made. Goes out: seconds, logits, memory.
Always holds: prefill is the forward call on the prompt, which fills a static cache, and decode runs
from the first new token to the last; only torch and transformers are needed.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .serve import memory

_GRAPHS = 64  # torch's limit of 8 for a code object would send a model back to eager
# What outputs are compared on.
TEXT = (
    "A steam engine is a heat engine that performs mechanical work using steam as its working "
    "fluid. The steam pushes a piston back and forth inside a cylinder, and a connecting rod and a "
    "crank turn this force into rotation. The first engines that were sold pumped water out of "
    "mines in 1712; sixty years later a separate condenser made them burn less than half of the "
    "coal. They drove mills, ships and locomotives until turbines, motors and the internal "
    "combustion engine took their place. Why did it take so long? Boilers burst, iron was dear, "
    "and nobody could bore a cylinder that was round to the thickness of a thin coin."
)


class _Clock:
    """A logits processor that changes nothing and notes when each step's logits came."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Note the time; the scores as they are."""
        self.seen.append(time.perf_counter())
        return scores


class HfModel:
    """Answers ``run``, ``logits`` and ``memory`` once it holds a model."""

    def __init__(self) -> None:
        self.model: Any = None
        self.tokenizer: Any = None
        self.plain: Any = None  # not compiled: one graph less to wait for where nothing is timed
        self.forwards: list[float] = []

    def hold(self, model: Any, tokenizer: Any) -> dict[str, Any]:
        """Take a model; size of its vocabulary, and the text that outputs are compared on."""
        self.model, self.tokenizer = model, tokenizer
        model.generation_config.eos_token_id = None  # nothing ends a text early
        self._time_forward()
        text, prefix = text_tokens(tokenizer, TEXT)
        size = model.get_input_embeddings().weight.shape[0]
        return {"vocabulary": size, "text": [*prefix, *text]}

    def run(self, ids: list[list[int]], tokens: int) -> dict[str, Any]:
        """Read prompts of one length and continue them greedily.

        Returns:
            ``prefill`` and ``decode``, seconds; decode of all tokens but the first.
        """
        from transformers import LogitsProcessorList

        given, clock = torch.tensor(ids), _Clock()
        given = given.to(next(self.model.parameters()).device)
        self.forwards.clear()
        with self._settings():
            self.model.generate(
                given,
                attention_mask=torch.ones_like(given),
                max_new_tokens=tokens,
                do_sample=False,
                cache_implementation="static",
                logits_processor=LogitsProcessorList([clock]),
            )
        return {
            "prefill": self.forwards[0],
            "decode": clock.seen[-1] - clock.seen[0],
        }

    def logits(self, ids: list[int], out: str) -> dict[str, Any]:
        """Write float32 ``[T, V]`` logits to a file of numpy's."""
        import numpy as np

        with self._settings():
            found = logits_of(self.plain or self.model)(torch.tensor(ids))
        np.save(out, found.float().numpy())
        return {}

    def memory(self) -> dict[str, Any]:
        """Peak of the resident set."""
        return {"peak": memory("VmHWM")}

    @contextlib.contextmanager
    def _settings(self) -> Iterator[None]:
        from torch._dynamo import config

        with config.patch(recompile_limit=_GRAPHS):
            yield

    def _time_forward(self) -> None:
        forward = self.model.forward

        @functools.wraps(forward)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            result = forward(*args, **kwargs)
            self.forwards.append(time.perf_counter() - begin)
            return result

        self.model.forward = timed


def logits_of(model: Callable[..., Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    """A causal language model as a function from ids ``[T]`` to logits ``[T, V]``."""

    def run(ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = model(input_ids=ids[None], use_cache=False).logits[0]
        return found.cpu()

    return run


def text_tokens(tokenizer: Any, text: str) -> tuple[list[int], list[int]]:
    """A text's tokens, and those that the tokenizer puts before every text."""
    # A long text is no mistake here, though the tokenizer warns of one: it is read in windows.
    limit, tokenizer.model_max_length = tokenizer.model_max_length, 1 << 60
    try:
        ids: list[int] = list(tokenizer(text, add_special_tokens=False).input_ids)
    finally:
        tokenizer.model_max_length = limit
    start = text[:64]
    plain: list[int] = list(tokenizer(start, add_special_tokens=False).input_ids)
    whole: list[int] = list(tokenizer(start).input_ids)
    places = range(len(whole) - len(plain) + 1)
    at = next((i for i in places if whole[i : i + len(plain)] == plain), 0)
    return ids, whole[:at]
