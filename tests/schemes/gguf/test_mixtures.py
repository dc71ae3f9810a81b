"""Models with a mixture of experts from GGUF files, against transformers' own eager experts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import gguf_mixtures
from support.gguf_exact import MXFP4, TYPES, agree, exact, ids_of, load, small
from support.gguf_writer import write_model

import qcompile
from qcompile.schemes.gguf.config import build_config
from qcompile.schemes.gguf.reader import GGUFFile
from qcompile.site import ExpertsSite


@pytest.mark.parametrize("name", gguf_mixtures.CONFIGS)
def test_logits_are_those_of_eager_experts(name: str, tmp_path: Path) -> None:
    source = small(name)
    types = MXFP4 if name == "gpt-oss" else TYPES
    path = write_model(tmp_path / "m.gguf", name, source, types=types)
    model = load(path)
    agree(model, exact(name, source, types), 1, 7, 512)
    sites = [e.site for e in model.qcompile.plan.entries if isinstance(e.site, ExpertsSite)]
    first = 1 if name.startswith("deepseek") else 0
    assert [s.name for s in sites] == [f"model.layers.{n}.mlp.experts" for n in range(first, 2)]
    # The file alone tells the same, but for the function between the products.
    told = [site for site in qcompile.open(path).sites() if isinstance(site, ExpertsSite)]
    assert [_said(site) for site in told] == [_said(site) for site in sites]


def _said(site: ExpertsSite) -> tuple[object, ...]:
    weight = site.weight
    return (site.name, site.bias, weight.spec, weight.shape, weight.nbytes)


# **** how the tensors are stored ****


@pytest.mark.parametrize("name", ["mixtral", "qwen2moe"])
@pytest.mark.parametrize("rename", [gguf_mixtures.one_by_one, gguf_mixtures.fused])
def test_other_ways_to_store_experts_give_the_same_logits(
    name: str, rename: Callable[[Any], Any], tmp_path: Path
) -> None:
    source = small(name)
    same = TYPES | {f"ffn_{role}_exps.weight": "Q4_0" for role in ("gate", "up", "down")}
    single = {f"ffn_{role}.{e}.weight": "Q4_0" for role in ("gate", "up", "down") for e in range(4)}
    paths = [
        write_model(tmp_path / "a.gguf", name, source, types=same),
        write_model(tmp_path / "b.gguf", name, source, types=same | single, rename=rename),
    ]
    assert set(GGUFFile.open(paths[0]).tensors) != set(GGUFFile.open(paths[1]).tensors)
    found = [load(path)(ids_of(7)).logits for path in paths]
    assert torch.equal(*found)
    agree(lambda ids: _Logits(found[1]), exact(name, source, same), 7)


class _Logits:
    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits


def test_banks_of_experts_may_have_types_of_their_own(tmp_path: Path) -> None:
    """The types that llama.cpp mixes in Q4_K_M files; blocks of 256 columns."""
    source = small("qwen3moe", hidden_size=256, moe_intermediate_size=256)
    types = {
        "ffn_gate_exps.weight": "Q4_K",
        "ffn_up_exps.weight": "Q4_K",
        "blk.0.ffn_down_exps.weight": "Q6_K",
        "blk.1.ffn_down_exps.weight": "Q5_K",
    }
    path = write_model(tmp_path / "m.gguf", "qwen3moe", source, types=types)
    model = load(path)
    agree(model, exact("qwen3moe", source, types), 1, 7)
    specs = {e.site.name: str(e.site.weight.spec) for e in model.qcompile.plan.entries}
    assert specs["model.layers.0.mlp.experts"] == "gate/up q4_k, down q6_k"
    assert specs["model.layers.1.mlp.experts"] == "gate/up q4_k, down q5_k"


@pytest.mark.parametrize("kind", ["F32", "F16"])
@pytest.mark.parametrize("name", ["qwen3moe", "gpt-oss"])
def test_experts_may_be_floats(name: str, kind: str, tmp_path: Path) -> None:
    source = small(name)
    types = {"attn_q.weight": "Q8_0"}
    types |= {f"ffn_{role}_exps.weight": kind for role in ("gate", "up", "down")}
    path = write_model(tmp_path / "m.gguf", name, source, types=types)
    model = load(path)
    agree(model, exact(name, source, types), 7)
    assert not any(isinstance(e.site, ExpertsSite) for e in model.qcompile.plan.entries)


def test_a_layer_of_floats_among_quantized_ones(tmp_path: Path) -> None:
    source = small("qwen3moe")
    types = {f"blk.0.ffn_{role}_exps.weight": "Q8_0" for role in ("gate", "up", "down")}
    path = write_model(tmp_path / "m.gguf", "qwen3moe", source, types=types)
    model = load(path)
    agree(model, exact("qwen3moe", source, types), 7)
    assert [e.site.name for e in model.qcompile.plan.entries] == ["model.layers.0.mlp.experts"]
    held = model.get_parameter("model.layers.1.mlp.experts.down_proj")
    assert torch.equal(held, source.get_parameter("model.layers.1.mlp.experts.down_proj"))


# **** routing ****


@pytest.mark.parametrize("chosen", [1, 4])
@pytest.mark.parametrize("name", ["qwen3moe", "gpt-oss"])
def test_one_expert_and_all_of_them(name: str, chosen: int, tmp_path: Path) -> None:
    source = small(name, num_experts_per_tok=chosen)
    path = write_model(tmp_path / "m.gguf", name, source, types=TYPES)
    agree(load(path), exact(name, source, TYPES), 1, 7)


@pytest.mark.parametrize("name", ["qwen3moe", "gpt-oss"])
def test_one_expert_has_every_token_and_one_has_none(name: str, tmp_path: Path) -> None:
    source = small(name)
    router = "router" if name == "gpt-oss" else "gate"
    ids = ids_of(512)
    with torch.no_grad():
        for n in range(2):
            layer = source.get_submodule(f"model.layers.{n}")
            norm: Any = layer.get_submodule("post_attention_layernorm")
            norm.weight.abs_()
            weight = layer.get_parameter(f"mlp.{router}.weight")
            weight.mul_(0.05)
            # Every token shares a direction, towards which one expert points and one away.
            source.get_parameter("model.embed_tokens.weight")[:, 0] = 40.0
            weight[2, 0], weight[3, 0] = 5.0, -5.0
    seen: list[torch.Tensor] = []
    for n in range(2):
        experts = source.get_submodule(f"model.layers.{n}.mlp.experts")
        experts.register_forward_pre_hook(lambda module, args: seen.append(args[1]))
    path = write_model(tmp_path / "m.gguf", name, source, types=TYPES)
    agree(load(path), exact(name, source, TYPES), 512)
    for chosen in seen:
        assert (chosen == 2).any(-1).all()
        assert not (chosen == 3).any()
    assert len(ids[0]) == 512


@pytest.mark.parametrize(
    ("name", "normed"), [("qwen2moe", True), ("qwen3moe", False), ("olmoe", True)]
)
def test_the_file_says_whether_weights_are_normalized(
    name: str, normed: bool, tmp_path: Path
) -> None:
    source = small(name, norm_topk_prob=normed)
    metadata = {f"{name}.expert_weights_norm": normed}
    path = write_model(tmp_path / "m.gguf", name, source, types=TYPES, metadata=metadata)
    agree(load(path), exact(name, source, TYPES), 7)


def test_clamped_queries_keys_and_values(tmp_path: Path) -> None:
    source = small("olmoe", clip_qkv=0.5)
    metadata = {"olmoe.attention.clamp_kqv": 0.5}
    path = write_model(tmp_path / "m.gguf", "olmoe", source, types=TYPES, metadata=metadata)
    agree(load(path), exact("olmoe", source, TYPES), 7)


def test_old_files_say_less(tmp_path: Path) -> None:
    """Qwen1.5-MoE as first converted: no widths of experts; they share feed_forward_length."""
    source = small("qwen2moe", moe_intermediate_size=48, shared_expert_intermediate_size=96)
    keys = ("expert_feed_forward_length", "expert_shared_feed_forward_length")
    metadata = {f"qwen2moe.{key}": None for key in keys}
    path = write_model(tmp_path / "m.gguf", "qwen2moe", source, metadata=metadata)
    config = build_config(GGUFFile.open(path))
    assert (config.moe_intermediate_size, config.shared_expert_intermediate_size) == (48, 96)
    assert qcompile.open(path).sites() == []
