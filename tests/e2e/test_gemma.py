"""The demo model against the plain path: Hugging Face in float32 on gguf-py's own weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gguf
import pytest
import torch
from support.zoo import gemma, relative_l2
from torch import nn

import qcompile
from qcompile.schemes import open_checkpoint

PROMPTS = (
    "The history of the steam engine begins",
    "def fibonacci(n):\n",
    "Die Hauptstadt von Frankreich ist",
)


@pytest.fixture(scope="module")
def compiled() -> Iterator[tuple[Any, Any]]:
    yield qcompile.load(gemma(), emitter="eager")
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def plain() -> Any:
    """The same model with float32 weights that gguf-py decoded, compiled by nobody."""
    path = gemma()
    model: Any = open_checkpoint(path).build(torch.float32)[0]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, model.config.num_hidden_layers)
    decoded = {
        tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type)
        for tensor in gguf.GGUFReader(str(path)).tensors
    }
    for name, parameter in list(model.named_parameters()):
        values = torch.from_numpy(decoded[names.get_name(name, try_suffixes=(".weight",))].copy())
        if "norm" in name:
            values = values - 1.0  # the converter stores the factor, the model one less
        owner, _, key = name.rpartition(".")
        weight = nn.Parameter(values.reshape(parameter.shape), requires_grad=False)
        setattr(model.get_submodule(owner), key, weight)
    model.tie_weights()
    return model


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_tokens_are_the_same(compiled: Any, plain: Any, prompt: str) -> None:
    model, tokenizer = compiled
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 64, "do_sample": False}
    found, expected = model.generate(ids, **settings), plain.generate(ids, **settings)
    assert found.shape[1] > ids.shape[1] + 8
    assert torch.equal(found, expected)


def test_logits_over_a_text(compiled: Any, plain: Any) -> None:
    model, tokenizer = compiled
    text = (qcompile.__doc__ or "") + (qcompile.load.__doc__ or "") * 3
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :128]
    assert ids.shape == (1, 128)
    with torch.no_grad():
        found, expected = model(ids).logits, plain(ids).logits
    assert relative_l2(found, expected) < 2e-5
    assert all(relative_l2(f, e) < 2e-4 for f, e in zip(found[0], expected[0], strict=True))


def test_prefill_decode_and_other_lengths_share_graphs_and_weights(compiled: Any) -> None:
    model, _ = compiled
    before = model.qcompile.compiles
    for length in (5, 9, 17, 33, 6):
        ids = torch.arange(100, 100 + length)[None]
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    assert model.qcompile.compiles - before <= 4
    assert not torch._dynamo.utils.counters["graph_break"]
    weights = {entry.site.weight.name for entry in model.qcompile.plan.entries}
    assert len(model.qcompile._packed) == len(weights)
