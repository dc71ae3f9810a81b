"""Perplexity, divergence and agreement, against torch's own and against known values."""

from __future__ import annotations

import itertools
import json
import math

import pytest
import torch
from support.zoo import ZOO, zoo_entry

from qcompile.bench.accuracy import Perplexity, divergence, measure, nll, windows
from qcompile.bench.models import decoded_model, logits_of, text_tokens
from qcompile.errors import OptionError
from qcompile.schemes import open_checkpoint

IDS = list(range(100, 120))


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 4


def test_losses_are_those_of_torch() -> None:
    logits, targets = random(150, 40), torch.arange(150) % 40
    found = nll(logits, targets)
    assert found.dtype == torch.float64
    expected = torch.nn.functional.cross_entropy(logits.double(), targets, reduction="none")
    assert torch.allclose(found, expected, rtol=1e-12)


def test_divergences_are_those_of_torch() -> None:
    p, q = random(150, 40), random(150, 40, seed=1)
    expected = torch.nn.functional.kl_div(
        q.double().log_softmax(-1), p.double().log_softmax(-1), reduction="none", log_target=True
    ).sum(-1)
    assert torch.allclose(divergence(p, q), expected, rtol=1e-10)
    assert divergence(p, p).max() == 0
    assert divergence(p, p + 3).max() < 1e-12


def test_a_token_that_cannot_come_adds_nothing() -> None:
    p, q = random(4, 10), random(4, 10, seed=1)
    p[:, 3] = q[:, 3] = -math.inf
    kept = [i for i in range(10) if i != 3]
    assert torch.allclose(divergence(p, q), divergence(p[:, kept], q[:, kept]))
    p[:, 3] = 0
    assert divergence(p, q).isinf().all()


def test_windows_do_not_overlap_and_start_alike() -> None:
    found = windows(IDS, [1], 6, 13)
    assert [w.tolist() for w in found] == [
        [1, 100, 101, 102, 103, 104],
        [1, 105, 106, 107, 108, 109],
    ]
    assert [len(w) for w in windows(IDS, [], 7, 1000)] == [7, 7]
    assert [w.tolist() for w in windows(IDS[:3], [1, 2], 512, 1000)] == [[1, 2, 100, 101, 102]]


@pytest.mark.parametrize(
    ("ids", "prefix", "size", "tokens"),
    [(IDS, [], 1, 100), (IDS, [1], 2, 100), (IDS, [], 10, 1), (IDS[:1], [], 10, 100)],
)
def test_windows_without_a_prediction(
    ids: list[int], prefix: list[int], size: int, tokens: int
) -> None:
    with pytest.raises(OptionError, match="2"):
        windows(ids, prefix, size, tokens)


@pytest.mark.parametrize("prefix", [0, 1, 2])
def test_what_is_predicted(prefix: int) -> None:
    table = random(8, 8)
    seen: list[int] = []

    def model(ids: torch.Tensor) -> torch.Tensor:
        seen.append(len(ids))
        return table[ids]

    texts = [torch.tensor([0, 1, 2, 3, 4]), torch.tensor([0, 1, 7, 6, 5])]
    calls: list[int] = []
    found = measure(texts, prefix, model, {}, lambda: calls.append(1))
    first = max(prefix, 1)
    pairs = [pair for t in texts for pair in list(itertools.pairwise(t))[first - 1 :]]
    expected = [-table[a].log_softmax(-1)[b].item() for a, b in pairs]
    assert found.perplexity.tokens == len(expected) == 2 * (5 - first)
    assert found.perplexity.nll == pytest.approx(sum(expected) / len(expected))
    deviation = torch.tensor(expected, dtype=torch.float64).std().item()
    assert found.perplexity.error == pytest.approx(deviation / len(expected) ** 0.5)
    assert (found.distances, seen, calls) == ({}, [5, 5], [1, 1])


def test_distances() -> None:
    table, other = random(8, 8), random(8, 8)
    other[2] = other[2].roll(1)
    texts = [torch.tensor([0, 1, 2, 3, 4])]
    found = measure(
        texts, 0, lambda ids: table[ids], {"same": lambda i: table[i], "other": lambda i: other[i]}
    )
    same, far = found.distances["same"], found.distances["other"]
    assert (same.kl, same.worst, same.top1) == (0, 0, 1)
    assert same.reference == found.perplexity
    assert far.top1 == 0.75
    assert far.kl == pytest.approx(far.worst / 4)
    assert far.worst == pytest.approx(divergence(other[2:3], table[2:3]).item())


def test_uniform_predictions_have_the_vocabulary_as_perplexity() -> None:
    found = measure([torch.arange(6)], 0, lambda ids: torch.zeros(6, 50), {})
    assert found.perplexity.value == pytest.approx(50)
    assert found.perplexity.spread < 1e-12
    assert Perplexity(9, 2.0, 0.1).spread == pytest.approx(0.1 * math.exp(2))


def test_another_vocabulary_is_refused() -> None:
    texts = [torch.arange(4)]
    with pytest.raises(OptionError, match=r"predicts 9 tokens, the model 8"):
        measure(texts, 0, lambda i: torch.zeros(4, 8), {"big": lambda i: torch.zeros(4, 9)})


def test_the_zoo_has_the_same_loss_on_its_windows() -> None:
    entry = zoo_entry("gguf-q2_k", "gguf", "dense")
    manifest = ZOO / "manifest.json"
    if not manifest.exists():
        pytest.skip("needs the checkpoint zoo at ../shared/zoo")
    texts = [torch.tensor(ids) for ids in json.loads(manifest.read_text())["window_tokens"]]
    model, _ = decoded_model(open_checkpoint(entry.path), torch.float32)
    found = measure(texts, 0, logits_of(model), {})
    assert found.perplexity.tokens == 8 * 255
    facts = json.loads(manifest.read_text())["entries"]
    [exact] = [e["exact_loss"]["nll_win2k"] for e in facts if e["id"] == "gguf-q2_k"]
    assert found.perplexity.nll == pytest.approx(exact, rel=1e-6)


class Tokenizer:
    """Letters as tokens, some put before and behind every text."""

    model_max_length = 4

    def __init__(self, before: list[int], behind: list[int]) -> None:
        self.before, self.behind = before, behind

    def __call__(self, text: str, add_special_tokens: bool = True) -> Tokenizer:
        assert len(text) <= self.model_max_length or self.model_max_length > 1000
        ids = [ord(letter) for letter in text]
        self.input_ids = [*self.before, *ids, *self.behind] if add_special_tokens else ids
        return self


@pytest.mark.parametrize("before", [[], [1], [1, 2], [97]])
@pytest.mark.parametrize("behind", [[], [3]])
def test_what_stands_before_a_text(before: list[int], behind: list[int]) -> None:
    made = Tokenizer(before, behind)
    made.model_max_length = 64
    ids, prefix = text_tokens(made, "aab" * 40)
    assert ids == [97, 97, 98] * 40
    assert prefix == before
    assert made.model_max_length == 64
