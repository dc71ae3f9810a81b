"""Checkpoint folders that other tools wrote: weights bit for bit, logits against float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.zoo import Entry, as_hashed, digest, folder_entry, relative_l2
from transformers import LlamaConfig, LlamaForCausalLM

import qcompile
from qcompile.spec import is_quantized

SCHEMES = {
    "gptq-w2-g32-asym": "gptq",
    "gptq-w4-chan-asym": "gptq",
    "gptq-w4-g128-dynamic-mixed": "gptq",
    "gptq-w4-g128-lmhead": "gptq",
    "gptq-w4-g128-sym": "gptq",
    "gptq-w4-g32-asym-actorder": "gptq",
    "gptq-w8-chan-sym": "gptq",
    "gptqv2-w2-g64-sym-actorder": "gptq",
    "awq-gemm-w4-g128": "awq",
    "ar-w2g32-asym": "auto_round",
    "ar-w4g128-asym-autoawq": "auto_round",
    "ar-w4g128-sym-autogptq": "auto_round",
    "ct-fp8-dynamic": "compressed_tensors",
    "ct-mxfp4a16": "compressed_tensors",
    "ct-nvfp4a16": "compressed_tensors",
    "ct-w4a16-g128-sym": "compressed_tensors",
}
MOE = {
    "moe-ct-w4a16-g128-sym": "compressed_tensors",
    "moe-gptq-w4-g128-sym": "gptq",
}
# The tool computed these references with weights that it had rounded to bfloat16.
ROUNDED_BOUND = {"ct-nvfp4a16": 1e-3, "moe-ct-w4a16-g128-sym": 1e-3}


def logits(entry: Entry, model: Any, length: str) -> torch.Tensor:
    found: torch.Tensor = model(torch.tensor([entry.sequences[length]])).logits[0]
    return found


def expected_logits(entry: Entry, length: str) -> torch.Tensor:
    """The exact model's, or the peer's where the two are the same."""
    references = entry.references
    exact = f"exact_logits_{length}"
    return torch.from_numpy(
        references[exact if exact in references.files else f"peer_logits_{length}"]
    )


@pytest.mark.parametrize("name", [*SCHEMES, *MOE])
def test_weights_are_bit_equal(name: str) -> None:
    entry = folder_entry(name)
    checkpoint = qcompile.open(entry.path)
    assert checkpoint.scheme == {**SCHEMES, **MOE}[name]
    for tensor, facts in entry.facts["weights"].items():
        assert is_quantized(checkpoint.tensors[tensor].spec)
        weight = checkpoint.dequantize(tensor)
        assert weight.dtype is torch.float32
        assert list(weight.shape) == facts["shape"]
        assert digest(as_hashed(entry, tensor, weight)) == facts["sha256"], tensor


@pytest.mark.parametrize("name", [*SCHEMES, *MOE])
def test_logits_and_loss_agree_with_the_exact_model(name: str) -> None:
    entry = folder_entry(name, whole=True)
    model: Any = qcompile.load(entry.path, emitter="eager", verify=True)[0]
    for length in ("128", "16"):
        found = logits(entry, model, length)
        difference = relative_l2(found[-16:], expected_logits(entry, length))
        assert difference < ROUNDED_BOUND.get(name, 1e-5), f"{length}: {difference:.2e}"
        ids = torch.tensor(entry.sequences[length])
        loss = torch.nn.functional.cross_entropy(found[:-1], ids[1:]).item()
        bound = 1e-5 if name not in ROUNDED_BOUND else 1e-3
        assert loss == pytest.approx(entry.facts["exact_loss"][f"loss_{length}"], rel=bound)
    assert model.qcompile.compiles == 1


def test_logits_of_nvfp4_with_weights_that_were_not_rounded() -> None:
    """The same bound as for the others, against transformers with the decoded weights."""
    entry = folder_entry("ct-nvfp4a16", whole=True)
    checkpoint = qcompile.open(entry.path)
    config: Any = LlamaConfig.from_pretrained(entry.path)
    config.quantization_config = None
    config._attn_implementation = "eager"
    exact: Any = LlamaForCausalLM(config).float().eval()
    exact.load_state_dict({name: checkpoint.dequantize(name) for name in checkpoint.tensors})
    model: Any = qcompile.load(entry.path, emitter="eager")[0]
    with torch.no_grad():
        difference = relative_l2(logits(entry, model, "16"), logits(entry, exact, "16"))
    assert difference < 1e-5


def test_a_plan_names_every_weight() -> None:
    """Mixed widths: layer 0 has 8 bits, layer 3's attention is float, the rest has 4."""
    entry = folder_entry("gptq-w4-g128-dynamic-mixed", whole=True)
    specs = {name: str(w.spec) for name, w in qcompile.open(entry.path).tensors.items()}
    assert specs["model.layers.0.mlp.up_proj.weight"].startswith("uint8 g32")
    assert specs["model.layers.1.mlp.up_proj.weight"].startswith("uint4 g128")
    assert specs["model.layers.3.self_attn.q_proj.weight"] == "bfloat16"
    assert specs["model.layers.3.mlp.up_proj.weight"].startswith("uint4 g128")
    for device in ("cpu", "cuda:sm90", "npu:910b"):
        plan = qcompile.plan(entry.path, device=device, on_unsupported="dequantize")
        assert "model.layers.0.mlp.up_proj" in plan.explain("model.layers.0.mlp.up_proj")
        assert not plan.refused


def test_generation_with_the_default_emitter() -> None:
    entry = folder_entry("gptq-w2-g32-asym", whole=True)
    torch._dynamo.reset()
    ids = torch.tensor([entry.sequences["16"]])
    settings: Any = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": 6,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    model: Any = qcompile.load(entry.path, emitter="inductor")[0]
    found = model.generate(ids, **settings)
    assert relative_l2(found.logits[0], expected_logits(entry, "16")[-1:]) < 1e-5
    eager: Any = qcompile.load(entry.path, emitter="eager")[0]
    assert torch.equal(found.sequences, eager.generate(ids, **settings).sequences)


def test_the_tokenizer_comes_with_the_folder() -> None:
    entry = folder_entry("gptq-w2-g32-asym", whole=True)
    tokenizer = qcompile.load(entry.path, emitter="eager")[1]
    text = "def read(self):\n    return self.items"
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text
