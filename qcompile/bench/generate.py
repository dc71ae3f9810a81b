"""Decode speed beside transformers with the same weights dequantized to bfloat16.

``python -m qcompile.bench.generate FILE`` loads a checkpoint twice: by qcompile, and as the
plain Hugging Face model whose weights are the dequantized ones in bfloat16 under ``torch.compile``.
Both generate the same number of tokens greedily with a static cache, in turns.

Comes in: a checkpoint. Goes out: milliseconds a token and their ratio.
Always holds: compiling is not timed; a round's time runs from the first new token to the last, so
that prefill and setup are left out.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._dynamo import config

import qcompile
from qcompile.bench.models import decoded_model
from qcompile.schemes import Checkpoint, open_checkpoint

_PROMPT = "The history of the steam engine begins"
_GRAPHS = 64  # torch's limit of 8 for a code object would send the second model back to eager


class Times:
    """A streamer that notes when each token came."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt first, then token after token."""
        self.seen.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left to flush."""


@dataclass(frozen=True)
class Contender:
    """A model that generates, and what it is called."""

    name: str
    model: Any


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", help="a checkpoint")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of a generation")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of turns")
    arguments = parser.parse_args()
    ours, tokenizer = qcompile.load(arguments.file)
    checkpoint = open_checkpoint(arguments.file)
    contenders = (
        Contender("qcompile float32 activations", ours),
        Contender("transformers bfloat16, torch.compile", dequantized(checkpoint, torch.bfloat16)),
    )
    ids = tokenizer(_PROMPT, return_tensors="pt").input_ids
    for contender in contenders:
        begin = time.perf_counter()
        for _ in range(2):
            decode(contender.model, ids, arguments.tokens)
        print(f"{contender.name}: ready after {time.perf_counter() - begin:.0f} s", flush=True)
    times = measure(contenders, ids, arguments.tokens, arguments.rounds)
    print(table(contenders, times))


def dequantized(checkpoint: Checkpoint, dtype: torch.dtype) -> nn.Module:
    """The plain Hugging Face model with every weight decoded to ``dtype``, compiled by torch."""
    model, _ = decoded_model(checkpoint, dtype)
    model.forward = torch.compile(model.forward)
    return model


def decode(model: Any, ids: torch.Tensor, tokens: int) -> float:
    """Milliseconds a token of one greedy generation, prefill left out."""
    times = Times()
    # Not min_new_tokens: its processors search the vocabulary for the end token, which takes longer
    # than all else that generate does around the model.
    model.generation_config.eos_token_id = None
    with config.patch(recompile_limit=_GRAPHS):
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            cache_implementation="static",
            streamer=times,
        )
    _, first, *_, last = times.seen
    return (last - first) / (tokens - 1) * 1e3


def measure(
    contenders: tuple[Contender, ...], ids: torch.Tensor, tokens: int, rounds: int
) -> dict[str, list[float]]:
    """Milliseconds a token, one figure for each round, the contenders taking turns."""
    times: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for _ in range(rounds):
        for contender in contenders:
            times[contender.name].append(decode(contender.model, ids, tokens))
    return times


def table(contenders: tuple[Contender, ...], times: dict[str, list[float]]) -> str:
    """The measurements as text; the ratio is the median over rounds of the rounds' ratios."""
    lines = ["decode                                  ms/token min  median   tokens/s"]
    for contender in contenders:
        found = times[contender.name]
        middle = statistics.median(found)
        lines.append(f"{contender.name:<40}{min(found):12.1f}{middle:8.1f}{1e3 / middle:11.1f}")
    ours, peer = (times[contender.name] for contender in contenders)
    ratio = statistics.median(b / a for a, b in zip(ours, peer, strict=True))
    lines.append(f"qcompile is {ratio:.2f} times as fast")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
