"""Float models with experts in three-dimensional parameters, quantized."""

from __future__ import annotations

import gc
import re
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from support.blocks import HIDDEN, Looping, Stack, without_loop
from support.gguf_mixtures import CONFIGS
from support.gguf_writer import tiny_model
from support.zoo import relative_l2
from torch import nn

import qcompile
from qcompile import register
from qcompile.errors import OptionError
from qcompile.site import ExpertsSite

IDS = torch.randint(0, 96, (2, 30), generator=torch.Generator().manual_seed(0))


def _model(name: str, **changes: Any) -> Any:
    return tiny_model(name, **{"num_hidden_layers": 2, **changes})


def _optimized(model: Any, **options: Any) -> Any:
    torch._dynamo.reset()
    settings = {"emitter": "eager", "verify": True, "group_size": 32, **options}
    return qcompile.optimize(model, **settings)


def _filled(model: Any, optimized: Any) -> Any:
    """A float model with the values of the quantized one."""
    turned = model.config.model_type == "gpt_oss"
    for name, weight in optimized.qcompile.catalogue.items():
        held, values = model.get_parameter(name), weight.dequantize()
        if turned and "experts" in name:
            if "gate_up" in name:
                gate, up = values.chunk(2, 1)
                values = torch.stack([gate, up], 2).flatten(1, 2)
            values = values.transpose(1, 2)
        held.copy_(values)
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_experts_are_rounded_and_run(name: str) -> None:
    """B53: only linears were walked, and most of the bytes stayed floats, silently."""
    model = _optimized(_model(name), scheme="rtn", bits=4)
    with torch.no_grad():
        expected = _filled(_model(name), model)(IDS).logits
    assert relative_l2(model(IDS).logits, expected) < 1e-5
    sites = [e.site for e in model.qcompile.plan.entries if isinstance(e.site, ExpertsSite)]
    assert len(sites) == (1 if name.startswith("deepseek") else 2)
    for site in sites:
        values = site.weight.shape[0] * site.weight.shape[1] * site.weight.shape[2]
        assert site.weight.nbytes < 0.35 * 2 * values
    [left] = [note for note in model.qcompile.plan.notes if "left in float" in note]
    assert not re.search(r"mlp\.experts\.\w+_proj(?!_bias)", left)
    assert "gate" in left or "router" in left


def test_eight_bits_are_close_to_the_floats() -> None:
    with torch.no_grad():
        expected = _model("qwen3moe")(IDS).logits
    model = _optimized(_model("qwen3moe"), scheme="rtn", bits=8)
    assert relative_l2(model(IDS).logits, expected) < 0.02


def test_floats_are_given_up_layer_by_layer() -> None:
    model = _model("qwen3moe")
    held = {
        name: weakref.ref(value) for name, value in model.named_parameters() if "experts" in name
    }
    alive: list[int] = []

    def progress(name: str, done: int, total: int) -> None:
        gc.collect()
        alive.append(sum(ref() is not None for ref in held.values()))
        assert done <= total

    _optimized(model, scheme="rtn", progress=progress)
    assert alive[0] == 4
    assert alive[-1] == 0
    assert sorted(alive, reverse=True) == alive
    with pytest.raises(OptionError, match="stand-in"):
        model.get_parameter("model.layers.0.mlp.experts.down_proj") + torch.ones(1)


def test_routers_and_skipped_experts_stay_in_float() -> None:
    plain = _model("qwen2moe")
    model = _optimized(_model("qwen2moe"), scheme="rtn", skip=[r"model\.layers\.0\.mlp\.experts"])
    names = set(model.qcompile.catalogue)
    assert "model.layers.1.mlp.experts.gate_up_proj" in names
    assert not any(name.startswith("model.layers.0.mlp.experts") for name in names)
    for name in (
        "model.layers.0.mlp.experts.down_proj",
        "model.layers.1.mlp.shared_expert_gate.weight",
        "model.layers.1.mlp.gate.weight",
    ):
        assert torch.equal(model.get_parameter(name), plain.get_parameter(name))
    kept = _optimized(
        _model("qwen2moe"), scheme="rtn", keep=[r".*layers\.1\.mlp\.experts\.down_proj"]
    )
    assert not any("layers.1.mlp.experts" in name for name in kept.qcompile.catalogue)


def test_gptq_has_a_hessian_for_every_expert() -> None:
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(0, 96, (4, 60), generator=generator) for _ in range(8)]
    options: dict[str, Any] = {"bits": 3, "sym": True}
    with torch.no_grad():
        expected = _model("qwen3moe")(batches[0]).logits
    rounded = _optimized(_model("qwen3moe"), scheme="rtn", **options)
    error = relative_l2(rounded(batches[0]).logits, expected)
    model = _optimized(_model("qwen3moe"), scheme="gptq", calibration=batches, **options)
    assert relative_l2(model(batches[0]).logits, expected) < 0.9 * error
    with torch.no_grad():
        same = _filled(_model("qwen3moe"), model)(IDS).logits
    assert relative_l2(model(IDS).logits, same) < 1e-5


@pytest.mark.parametrize("name", ["gpt-oss", "deepseek3"])
def test_gptq_of_other_shapes_of_experts(name: str) -> None:
    batches = [torch.randint(0, 96, (4, 60), generator=torch.Generator().manual_seed(1))]
    with torch.no_grad():
        expected = _model(name)(batches[0]).logits
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        model = _optimized(_model(name), scheme="gptq", calibration=batches)
        rounded = _optimized(_model(name), scheme="rtn", sym=True)
    error = relative_l2(rounded(batches[0]).logits, expected)
    assert relative_l2(model(batches[0]).logits, expected) < error
    with torch.no_grad():
        same = _filled(_model(name), model)(IDS).logits
    assert relative_l2(model(IDS).logits, same) < 1e-5


def test_an_expert_without_calibration_tokens_is_rounded_and_named() -> None:
    """B57: an expert that no token chose made an error, or scales that are no numbers."""

    def shunned() -> Any:
        model = _model("gpt-oss")
        model.get_parameter("model.layers.1.mlp.router.bias")[3] = -1e4
        return model

    batches = [torch.randint(0, 96, (4, 60), generator=torch.Generator().manual_seed(1))]
    with pytest.warns(UserWarning, match=r"layers\.1\.mlp\.experts\.gate_up_proj\[3\]"):
        model = _optimized(shunned(), scheme="gptq", calibration=batches)
    [note] = [note for note in model.qcompile.plan.notes if "no calibration data reached" in note]
    assert "model.layers.1.mlp.experts.down_proj[3]" in note
    assert "model.layers.0.mlp.experts.down_proj[3]" not in note
    exact = shunned()
    for name in ("gate_up_proj", "down_proj"):
        weight = model.qcompile.catalogue[f"model.layers.1.mlp.experts.{name}"].dequantize()
        assert torch.isfinite(weight).all()
    # Later it is chosen all the same.
    for one in (model, exact):
        one.get_parameter("model.layers.1.mlp.router.bias").data[3] = 1e4
    with torch.no_grad():
        expected = _filled(exact, model)(IDS).logits
    assert relative_l2(model(IDS).logits, expected) < 1e-5


def test_padding_is_not_counted() -> None:
    ids = torch.randint(0, 96, (2, 30), generator=torch.Generator().manual_seed(3))
    padded = torch.cat([ids, torch.zeros(2, 30, dtype=ids.dtype)], 1)
    mask = torch.cat([torch.ones_like(ids), torch.zeros_like(ids)], 1)
    found = []
    for batch in ({"input_ids": ids}, {"input_ids": padded, "attention_mask": mask}):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            model = _optimized(_model("qwen3moe"), scheme="gptq", calibration=[batch])
        found.append(model.qcompile.catalogue["model.layers.0.mlp.experts.gate_up_proj"])
    one, other = (weight.dequantize() for weight in found)
    assert (one == other).float().mean() > 0.99


def test_a_block_of_ones_own() -> None:
    before = dict(register._KNOWN)
    qcompile.register_experts(Looping, without_loop, gate="w1", up="w3", down="w2")
    try:
        x = torch.randn(1, 40, HIDDEN, generator=torch.Generator().manual_seed(2))
        with torch.no_grad():
            expected = Stack(Looping).eval()(x)
        for options in ({"scheme": "rtn"}, {"scheme": "gptq", "calibration": [x]}):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                model = _optimized(Stack(Looping).eval(), bits=8, **options)
            assert relative_l2(model(x), expected) < 0.02
            assert "layers.0.experts.gate_up_proj" in model.qcompile.catalogue
            assert isinstance(model.layers[0].gate, nn.Linear)
            assert "layers.0.gate.weight" not in model.qcompile.catalogue
    finally:
        register._KNOWN.clear()
        register._KNOWN.update(before)


def test_experts_are_not_written_as_gptq(tmp_path: Path) -> None:
    model = _optimized(_model("qwen3moe"), scheme="rtn", sym=True)
    with pytest.raises(OptionError, match=r"experts"):
        qcompile.save_checkpoint(model, tmp_path / "folder")
    assert not (tmp_path / "folder").exists()
