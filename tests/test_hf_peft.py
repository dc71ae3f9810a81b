"""LoRA adapters beside quantized weights: what PEFT does with a compiled model."""

from __future__ import annotations

import copy
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from peft import LoraConfig, PeftModel, get_peft_model
from support.llama import IDS, exact_llama, llama_config, llama_layers, write_llama
from support.pack_gptq import Gptq, gptq
from support.zoo import relative_l2
from transformers import AutoModelForCausalLM
from transformers.integrations.peft import MIN_PEFT_VERSION

import qcompile
from qcompile.errors import OptionError

LORA = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
OTHER = LoraConfig(r=2, target_modules=["v_proj", "lm_head"], init_lora_weights=False)


def models(folder: Path) -> tuple[Any, Any]:
    """A compiled Llama and the exact one."""
    config = llama_config(num_hidden_layers=1)
    layers = llama_layers(config, lambda name, n, k, seed: gptq(n, k, Gptq(4, 32), seed))
    write_llama(folder, config, layers, Gptq(4, 32).config)
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=qcompile.HFConfig(emitter="eager"), dtype=torch.float32
    )
    return model, exact_llama(config, layers).eval()


def adapted(model: Any, lora: LoraConfig = LORA) -> Any:
    torch.manual_seed(1)
    return get_peft_model(model, copy.deepcopy(lora)).eval()


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Any, Any]:
    torch._dynamo.reset()
    return models(tmp_path / "model")


def same(model: Any, exact: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS).logits
        assert relative_l2(found, exact(input_ids=IDS).logits) < 1e-5
    return found


def test_adapters_are_used_switched_and_taken_off(pair: tuple[Any, Any]) -> None:
    model, exact = pair
    plain = same(model, exact)  # graphs of the model alone are there already
    model, exact = adapted(model), adapted(exact)
    first = same(model, exact)
    assert relative_l2(first, plain) > 0.05
    for each in (model, exact):
        torch.manual_seed(2)
        each.add_adapter("other", copy.deepcopy(OTHER))
        each.set_adapter("other")
    second = same(model, exact)
    assert min(relative_l2(second, first), relative_l2(second, plain)) > 0.05
    for each in (model, exact):
        each.set_adapter("default")
    assert torch.equal(same(model, exact), first)
    with model.disable_adapter(), exact.disable_adapter():
        assert torch.equal(same(model, exact), plain)
    adapters = [p for name, p in model.named_parameters() if "lora_" in name]
    assert {p.dtype for p in adapters} == {torch.float32}
    taken = model.unload()
    assert torch.equal(same(taken, exact.unload()), plain)


def test_generate(pair: tuple[Any, Any]) -> None:
    said = [
        adapted(each).generate(
            input_ids=IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=8, do_sample=False
        )
        for each in pair
    ]
    assert torch.equal(*said)


def test_adapters_are_saved_and_loaded_again(pair: tuple[Any, Any], tmp_path: Path) -> None:
    model = adapted(pair[0])
    with torch.no_grad():
        expected = model(input_ids=IDS).logits
    model.save_pretrained(tmp_path / "adapter")
    assert not list((tmp_path / "adapter").glob("model*"))
    fresh = models(tmp_path / "fresh")[0]
    loaded = PeftModel.from_pretrained(fresh, tmp_path / "adapter")
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=IDS).logits, expected)


@pytest.mark.skipif(
    Version(version("peft")) < Version(MIN_PEFT_VERSION),
    reason=f"this transformers takes adapters of its own from peft {MIN_PEFT_VERSION} on",
)
def test_adapters_of_transformers(pair: tuple[Any, Any], tmp_path: Path) -> None:
    """``add_adapter`` of the model itself, without a PEFT model around it."""
    for each in pair:
        torch.manual_seed(1)
        each.add_adapter(copy.deepcopy(LORA))
        each.eval()
    expected = same(*pair)
    pair[0].save_pretrained(tmp_path / "adapter")
    assert [p.name for p in (tmp_path / "adapter").glob("*.safetensors")] == [
        "adapter_model.safetensors"
    ]
    fresh = models(tmp_path / "fresh")[0]
    fresh.load_adapter(str(tmp_path / "adapter"))
    with torch.no_grad():
        assert torch.equal(fresh(input_ids=IDS).logits, expected)


def test_backward_is_an_error(pair: tuple[Any, Any]) -> None:
    model = adapted(pair[0])
    loss = model(input_ids=IDS, labels=IDS).loss
    with pytest.raises(OptionError, match=r"backward was called[\s\S]*no_grad"):
        loss.backward()
    inputs = torch.randn(1, 3, 64, requires_grad=True)
    with pytest.raises(OptionError, match="backward"):
        pair[0](inputs_embeds=inputs).logits.sum().backward()
    assert all(p.grad is None for p in model.parameters())


def test_nothing_asks_for_a_gradient(pair: tuple[Any, Any]) -> None:
    assert not pair[0](IDS).logits.requires_grad


def test_merging_is_an_error(pair: tuple[Any, Any]) -> None:
    model = adapted(pair[0])
    with pytest.raises(OptionError, match=r"stand-in[\s\S]*cannot be merged"):
        model.merge_and_unload()


@pytest.mark.parametrize(
    "options", [{"init_lora_weights": "pissa"}, {"init_lora_weights": "olora"}, {"use_dora": True}]
)
def test_adapters_that_read_weights_are_errors(
    pair: tuple[Any, Any], options: dict[str, Any]
) -> None:
    lora: Any = LoraConfig(r=4, target_modules=["q_proj"], **options)
    with pytest.raises(OptionError, match="stand-in"):
        get_peft_model(pair[0], lora)


def test_saving_the_model_with_adapters_is_an_error(pair: tuple[Any, Any], tmp_path: Path) -> None:
    adapted(pair[0])
    with pytest.raises(OptionError, match="adapters are attached"):
        pair[0].save_pretrained(tmp_path / "saved")
