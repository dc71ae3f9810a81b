"""What ``generate`` and pipelines do with a compiled model: the texts of the exact float model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.texts import Pair, text_models
from transformers import CompileConfig, TextIteratorStreamer, TextStreamer, pipeline

TEXTS = ["The capital of the country", "In the beginning there was a very small", "He said"]
NEW = 12


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    torch._dynamo.reset()
    yield text_models(tmp_path_factory.mktemp("model"))
    torch._dynamo.reset()


def both(pair: Pair, texts: list[str], **options: Any) -> torch.Tensor:
    """The ids of both models, which have to be the same."""
    model, exact, tokenizer = pair
    found = []
    for each in (exact, model):
        torch.manual_seed(7)
        given = tokenizer(texts, return_tensors="pt", padding=True)
        found.append(each.generate(**given, **{"max_new_tokens": NEW, **options}))
    assert torch.equal(*found)
    made: torch.Tensor = found[1]
    return made


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_greedy(pair: Pair, cache: str) -> None:
    both(pair, TEXTS[:1], cache_implementation=cache)


def test_without_a_cache(pair: Pair) -> None:
    both(pair, TEXTS[:1], use_cache=False, max_new_tokens=3)


def test_sampled(pair: Pair) -> None:
    first = both(pair, TEXTS[:1], do_sample=True, temperature=0.8, top_k=20, top_p=0.9)
    assert not torch.equal(first, both(pair, TEXTS[:1]))


def test_beams(pair: Pair) -> None:
    both(pair, TEXTS[:2], num_beams=3, num_return_sequences=2)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_batch_with_left_padding_says_what_each_text_says_alone(pair: Pair, cache: str) -> None:
    model, _, tokenizer = pair
    together = both(pair, TEXTS, cache_implementation=cache)
    for row, text in zip(together, TEXTS, strict=True):
        alone = tokenizer(text, return_tensors="pt")
        said = model.generate(**alone, max_new_tokens=NEW, cache_implementation=cache)[0]
        assert torch.equal(row[-NEW:], said[-NEW:])
        assert (row == tokenizer.pad_token_id).sum() == len(row) - len(said)


def test_inference_mode(pair: Pair) -> None:
    model, exact, tokenizer = pair
    given = tokenizer(TEXTS[:1], return_tensors="pt")
    with torch.inference_mode():
        inside = model(**given).logits
        said = model.generate(**given, max_new_tokens=NEW)
    assert inside.is_inference()
    torch.testing.assert_close(inside, exact(**given).logits, rtol=1e-4, atol=1e-4)
    assert torch.equal(said, model.generate(**given, max_new_tokens=NEW))
    torch.testing.assert_close(model(**given).logits, inside, rtol=1e-5, atol=1e-5)


def test_streams(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    model, _, tokenizer = pair
    given = tokenizer(TEXTS[0], return_tensors="pt")
    prompt = given.input_ids.shape[1]
    said = model.generate(**given, max_new_tokens=NEW)[0]
    text = tokenizer.decode(said[prompt:], skip_special_tokens=True)
    options = {"skip_prompt": True, "skip_special_tokens": True}
    capsys.readouterr()
    model.generate(**given, max_new_tokens=NEW, streamer=TextStreamer(tokenizer, **options))
    assert capsys.readouterr().out == text + "\n"
    pieces = TextIteratorStreamer(tokenizer, timeout=60, **options)
    work = threading.Thread(
        target=model.generate, kwargs={**given, "max_new_tokens": NEW, "streamer": pieces}
    )
    work.start()
    assert "".join(pieces) == text
    work.join()


def test_a_pipeline(pair: Pair) -> None:
    model, exact, tokenizer = pair
    found = []
    for each in (exact, model):
        run: Any = pipeline("text-generation", model=each, tokenizer=tokenizer, batch_size=2)
        found.append(run(TEXTS, max_new_tokens=NEW, return_full_text=False, do_sample=False))
    assert found[0] == found[1]
    assert len(found[1]) == len(TEXTS)


def test_labels_give_the_loss(pair: Pair) -> None:
    model, exact, tokenizer = pair
    given = tokenizer(TEXTS[1], return_tensors="pt")
    with torch.no_grad():
        losses = [each(**given, labels=given.input_ids).loss for each in (exact, model)]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)


def test_a_compile_around_it_does_not_look_inside(tmp_path: Path) -> None:
    """As ``generate`` compiles on GPUs, where a cache has one shape."""
    torch._dynamo.reset()
    model, exact, tokenizer = text_models(tmp_path / "model")
    given = tokenizer(TEXTS[0], return_tensors="pt")
    with torch.no_grad():
        around: Any = torch.compile(model, backend="eager")(**given).logits  # the first call
        torch.testing.assert_close(around, exact(**given).logits, rtol=1e-4, atol=1e-4)
    model.hf_quantizer = None  # else generate is told not to
    compiling = CompileConfig(backend="eager", mode=None)
    compiling._compile_all_devices = True
    options = {"max_new_tokens": 5, "cache_implementation": "static"}
    made = model.generate(**given, **options, compile_config=compiling)
    assert hasattr(model, "_compiled_call")
    assert torch.equal(made, exact.generate(**given, **options))
