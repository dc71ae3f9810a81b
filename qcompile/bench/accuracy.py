"""How well a model predicts a text, and how far it is from another one.

Comes in: logits of windows of a text. Goes out: perplexity, Kullback-Leibler divergence, top-1
agreement. Always holds: every window has a context of its own; all figures are means over the
positions that predict a token of the text, computed in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from qcompile.errors import OptionError

Logits = Callable[[torch.Tensor], torch.Tensor]
_ROWS = 64  # positions computed at a time: a row of float64 for 262144 tokens takes 2 MB


@dataclass(frozen=True)
class Perplexity:
    """How well a model predicts a text.

    Attributes:
        tokens: how many were predicted.
        nll: mean negative log-likelihood of a token, natural logarithm.
        error: standard error of that mean.
    """

    tokens: int
    nll: float
    error: float

    @property
    def value(self) -> float:
        """The perplexity, ``exp(nll)``."""
        return math.exp(self.nll)

    @property
    def spread(self) -> float:
        """Standard error of the perplexity, to first order."""
        return self.value * self.error


@dataclass(frozen=True)
class Distance:
    """How far a model's predictions are from a reference's.

    Attributes:
        kl: mean of ``sum p log(p / q)``, p the reference, in nats.
        worst: the largest over positions.
        top1: share of positions where both have the same most likely token.
        reference: how well the reference predicts the text.
    """

    kl: float
    worst: float
    top1: float
    reference: Perplexity


@dataclass(frozen=True)
class Scores:
    """A model's perplexity, and its distance from each reference by the reference's name."""

    perplexity: Perplexity
    distances: dict[str, Distance]


def windows(
    ids: Sequence[int], prefix: Sequence[int], size: int, tokens: int
) -> list[torch.Tensor]:
    """A text in windows that do not overlap.

    Args:
        ids: tokens of the text, without those that a tokenizer puts around a text.
        prefix: what it puts before one; it stands in front of every window.
        size: tokens of a window with its prefix.
        tokens: how many of the text to use at most.

    Returns:
        int64 ``[size]`` each; what is left at the end of the text is not used, unless it is all.

    Raises:
        OptionError: windows are too small, or the text is.
    """
    room = size - len(prefix)
    if room < 2 or tokens < 2:
        raise OptionError(
            f"--window {size} --tokens {tokens}",
            f"no token to predict: {len(prefix)} of a window are the model's own",
            "windows of 2 tokens of the text, or more",
            "ask for more",
        )
    used = list(ids[:tokens])
    if len(used) < 2:
        raise OptionError("--text", f"{len(used)} tokens", "2 or more", "use a longer text")
    room = min(room, len(used))
    starts = range(0, len(used) - room + 1, room)
    return [torch.tensor([*prefix, *used[start : start + room]]) for start in starts]


def measure(
    texts: Sequence[torch.Tensor],
    prefix: int,
    model: Logits,
    references: dict[str, Logits],
    done: Callable[[], object] = lambda: None,
) -> Scores:
    """Run every window through the models.

    Args:
        texts: the windows.
        prefix: how many tokens in front of each are not of the text; they are not predicted.
        model: logits ``[T, V]`` of ids ``[T]``.
        references: models to compare with, by name.
        done: called after every window.
    """
    first = max(prefix, 1)  # nothing predicts the first token of a window
    losses: dict[str, list[torch.Tensor]] = {name: [] for name in ("", *references)}
    gaps: dict[str, list[torch.Tensor]] = {name: [] for name in references}
    same: dict[str, list[torch.Tensor]] = {name: [] for name in references}
    for ids in texts:
        kept, targets = slice(first - 1, len(ids) - 1), ids[first:]
        found = model(ids)[kept]
        losses[""].append(nll(found, targets))
        for name, run in references.items():
            expected = run(ids)[kept]
            _same_vocabulary(name, expected, found)
            losses[name].append(nll(expected, targets))
            gaps[name].append(divergence(expected, found))
            same[name].append(expected.argmax(-1) == found.argmax(-1))
        done()
    distances = {
        name: Distance(
            torch.cat(gaps[name]).mean().item(),
            torch.cat(gaps[name]).max().item(),
            torch.cat(same[name]).double().mean().item(),
            _perplexity(losses[name]),
        )
        for name in references
    }
    return Scores(_perplexity(losses[""]), distances)


def nll(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihood of each target, float64 ``[T]``.

    Args:
        logits: ``[T, V]``.
        targets: int64 ``[T]``.
    """
    parts = [
        -rows.double().log_softmax(-1).gather(-1, wanted[:, None])[:, 0]
        for rows, wanted in zip(logits.split(_ROWS), targets.split(_ROWS), strict=True)
    ]
    return torch.cat(parts)


def divergence(reference: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Kullback-Leibler divergence from the reference at each position, float64 ``[T]``."""
    return torch.cat(list(_divergences(reference, logits)))


def _divergences(reference: torch.Tensor, logits: torch.Tensor) -> Iterator[torch.Tensor]:
    for expected, found in zip(reference.split(_ROWS), logits.split(_ROWS), strict=True):
        p, q = expected.double().log_softmax(-1), found.double().log_softmax(-1)
        gap = torch.where(p == -math.inf, 0.0, p.exp() * (p - q))
        # A sum of rounded terms may fall below zero, which no divergence does.
        yield gap.sum(-1).clamp(min=0.0)


def _perplexity(losses: Sequence[torch.Tensor]) -> Perplexity:
    every = torch.cat(list(losses))
    spread = every.std().item() if len(every) > 1 else math.nan
    return Perplexity(len(every), every.mean().item(), spread / math.sqrt(len(every)))


def _same_vocabulary(name: str, expected: torch.Tensor, found: torch.Tensor) -> None:
    if expected.shape != found.shape:
        raise OptionError(
            f"--against {name}",
            f"predicts {expected.shape[-1]} tokens, the model {found.shape[-1]}",
            "a model with the same vocabulary",
            "name the float model of this checkpoint",
        )
