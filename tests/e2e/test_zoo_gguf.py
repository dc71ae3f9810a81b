"""GGUF checkpoints that other tools wrote: weights bit for bit, logits against float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.zoo import digest, relative_l2, zoo_entry

import qcompile

KNOWN = ("gguf-iq4_xs", "gguf-mxfp4-mixed", "gguf-potpourri", "gguf-q2_k", "gguf-q4_k_m")


@pytest.mark.parametrize("name", KNOWN)
def test_weights_are_bit_equal(name: str) -> None:
    entry = zoo_entry(name, "gguf", "dense")
    checkpoint = qcompile.open(entry.path)
    for tensor, facts in entry.facts["weights"].items():
        weight = checkpoint.dequantize(tensor)
        assert list(weight.shape) == facts["shape"]
        assert digest(weight) == facts["sha256"], tensor


@pytest.mark.parametrize("name", KNOWN)
def test_logits_agree_with_the_exact_model(name: str) -> None:
    entry = zoo_entry(name, "gguf", "dense")
    model: Any = qcompile.load(entry.path, emitter="eager", verify=True)[0]
    for length in ("128", "16"):
        ids = torch.tensor([entry.sequences[length]])
        logits = model(ids).logits[0, -16:]
        expected = torch.from_numpy(entry.references[f"exact_logits_{length}"])
        assert relative_l2(logits, expected) < 1e-5
    assert model.qcompile.compiles == 1


def test_the_default_emitter_agrees_too() -> None:
    """Inductor, layer by layer where a compiler is found: prefill, and decode with a cache."""
    entry = zoo_entry("gguf-q2_k", "gguf", "dense")
    torch._dynamo.reset()
    model: Any = qcompile.load(entry.path, emitter="inductor")[0]
    ids = torch.tensor([entry.sequences["16"]])
    settings: Any = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": 12,
        "do_sample": False,
        "cache_implementation": "static",
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    found = model.generate(ids, **settings)
    expected = torch.from_numpy(entry.references["exact_logits_16"])[-1:]
    assert relative_l2(found.logits[0], expected) < 1e-5
    eager: Any = qcompile.load(entry.path, emitter="eager")[0]
    assert torch.equal(found.sequences, eager.generate(ids, **settings).sequences)
    assert model.qcompile.compiles == 2


def test_a_cache_that_the_caller_made() -> None:
    """Its length is one symbol in every layer's inputs: each region has to know it."""
    from transformers import StaticCache

    entry = zoo_entry("gguf-q2_k", "gguf", "dense")
    model: Any = qcompile.load(entry.path, emitter="inductor")[0]
    plain: Any = qcompile.load(entry.path, emitter="eager")[0]
    ids = torch.tensor([entry.sequences["16"]])
    with torch.inference_mode():
        cache = StaticCache(config=model.config, max_cache_len=37)
        model(ids[:, :-1], past_key_values=cache)
        found = model(ids[:, -1:], past_key_values=cache).logits[0, -1]
        assert relative_l2(found, plain(ids).logits[0, -1]) < 1e-5


def test_loss_on_the_text_is_as_stored() -> None:
    entry = zoo_entry("gguf-q2_k", "gguf", "dense")
    model, _ = qcompile.load(entry.path, emitter="eager")
    for length in ("128", "16"):
        ids = torch.tensor([entry.sequences[length]])
        logits = model(ids).logits[0]
        loss = torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:])
        assert loss.item() == pytest.approx(entry.facts["exact_loss"][f"loss_{length}"], rel=1e-5)
