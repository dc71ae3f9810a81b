"""Mixtures of experts that other tools wrote: logits, loss, generation, number of compilations."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from support.zoo import Entry, digest, entries, folder_entry, relative_l2, zoo_entry

import qcompile
from qcompile.site import ExpertsSite
from qcompile.spec import is_quantized

NAMES = ("moe-gguf-q4_k_m", "moe-gptq-w4-g128-sym", "moe-ct-w4a16-g128-sym")


def _entry(name: str) -> Entry:
    if "gguf" in name:
        return zoo_entry(name, "gguf", "moe")
    return folder_entry(name, whole=True)


def _load(entry: Entry, **options: Any) -> Any:
    torch._dynamo.reset()
    return qcompile.load(entry.path, **{"emitter": "eager", **options})[0]


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_loss_agree_with_the_exact_model(name: str) -> None:
    entry = _entry(name)
    model = _load(entry, verify=True)
    # The tool computed the exact reference of this one with weights rounded to bfloat16.
    bound = 1e-3 if "ct" in name else 1e-5
    for length in ("128", "16"):
        ids = torch.tensor([entry.sequences[length]])
        found = model(ids).logits[0]
        expected = torch.from_numpy(entry.references[f"exact_logits_{length}"])
        difference = relative_l2(found[-16:], expected)
        assert difference < bound, f"{length}: {difference:.2e}"
        loss = torch.nn.functional.cross_entropy(found[:-1], ids[0, 1:]).item()
        assert loss == pytest.approx(entry.facts["exact_loss"][f"loss_{length}"], rel=bound)
    assert model.qcompile.compiles == 1
    sites = [e.site for e in model.qcompile.plan.entries if isinstance(e.site, ExpertsSite)]
    assert [site.name for site in sites] == [f"model.layers.{n}.mlp.experts" for n in range(4)]
    assert all(is_quantized(site.weight.spec) and site.weight.nbytes > 0 for site in sites)


def test_weights_of_a_file_are_bit_equal() -> None:
    entry = _entry("moe-gguf-q4_k_m")
    checkpoint = qcompile.open(entry.path)
    assert any("_exps" in name for name in entry.facts["weights"])
    for listed, facts in entry.facts["weights"].items():
        match = re.fullmatch(r"(.+?)(?:\[(\d+)\])?", listed)
        assert match is not None
        weight = checkpoint.dequantize(match[1])
        weight = weight if match[2] is None else weight[int(match[2])]
        assert list(weight.shape) == facts["shape"]
        assert digest(weight) == facts["sha256"], listed


@pytest.mark.parametrize("name", NAMES)
def test_five_lengths_need_few_compilations(name: str) -> None:
    """Graph breaks raise: the whole forward is one graph."""
    entry = _entry(name)
    model = _load(entry)
    tokens = torch.tensor([entry.sequences["128"]])
    for length in (1, 7, 16, 64, 128):
        assert model(tokens[:, :length]).logits.shape[1] == length
    assert model.qcompile.compiles <= 4


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_with_each_cache(cache: str) -> None:
    entry = _entry("moe-gguf-q4_k_m")
    model = _load(entry)
    settings: Any = {
        "max_new_tokens": 8,
        "do_sample": False,
        "cache_implementation": cache,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    tokens = torch.tensor([entry.sequences["128"]])
    made: dict[int, Any] = {}
    for length in (1, 7, 16, 64, 128):
        ids = tokens[:, :length]
        made[length] = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    assert model.qcompile.compiles <= 4
    for length, found in made.items():
        whole = model(found.sequences[:, :-1]).logits[:, length - 1 :]
        assert relative_l2(torch.stack(found.logits, 1), whole) < 1e-4


def test_the_default_emitter_generates_the_same() -> None:
    entry = _entry("moe-gguf-q4_k_m")
    ids = torch.tensor([entry.sequences["16"]])
    settings: Any = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6}
    settings |= {"do_sample": False, "cache_implementation": "static"}
    found = _load(entry, emitter="inductor").generate(ids, **settings)
    assert torch.equal(found, _load(entry).generate(ids, **settings))


def test_a_plan_shows_the_bytes_of_the_experts() -> None:
    found = entries("gguf", "moe").get("moe-gguf-q4_k_m")
    if found is None:
        pytest.skip("the mixture-of-experts file needs the checkpoint zoo at ../shared/zoo")
    plan = qcompile.plan(found.path)
    text = plan.explain("model.layers.2.mlp.experts")
    assert "gate/up q4_k, down q6_k" in text
    [entry] = [e for e in plan.entries if e.site.name == "model.layers.2.mlp.experts"]
    # Eight experts of 256 x 256: two matrices at 144 bytes for 256 values, one at 210.
    assert entry.site.weight.nbytes == 8 * 256 * (2 * 144 + 210)
