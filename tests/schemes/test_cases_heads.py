"""Reported faults of embeddings, tied weights and heads: B63 to B69."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from support.folders import BOUND, checked
from support.gguf_blocks import finite_bytes
from support.llama import IDS, check_llama, exact_llama, llama_config, llama_layers, write_llama
from support.pack_awq import Awq, awq
from support.pack_compressed import Compressed, compressed_config, integer_weights, pack_quantized
from support.pack_gptq import Gptq, gptq
from support.packers import Packed
from support.zoo import relative_l2
from torch import nn

import qcompile
from qcompile.errors import SchemeError
from qcompile.schemes.gguf.blocks import BLOCKS

Layers = dict[str, Packed | torch.Tensor]
BASE = Gptq(4, 32)


def gptq_body(name: str, n: int, k: int, seed: int) -> Packed | None:
    return None if name == "lm_head" else gptq(n, k, BASE, seed)


def gptq_all(name: str, n: int, k: int, seed: int) -> Packed | None:
    return gptq(n, k, BASE, seed)


# **** B63, B65: what the config says of the head and what the file holds ****


def test_b63_tied_in_the_config_and_two_tensors_in_the_file(tmp_path: Path) -> None:
    """The file's own head, or a refusal that names it: never the embedding instead."""
    config = llama_config(tie_word_embeddings=True)
    layers = llama_layers(config, gptq_body, head=False)
    embedding = layers["model.embed_tokens.weight"]
    assert isinstance(embedding, torch.Tensor)
    layers["lm_head.weight"] = embedding * 2
    folder = write_llama(tmp_path / "model", config, layers, BASE.config)
    try:
        found = qcompile.load(folder, emitter="eager")[0](IDS).logits
    except SchemeError as error:
        checked(error, "lm_head.weight")
        return
    free = llama_config(tie_word_embeddings=False)
    assert relative_l2(found, exact_llama(free, layers)(IDS).logits) < BOUND


def test_b63_tied_and_the_same_tensor_twice(tmp_path: Path) -> None:
    config = llama_config(tie_word_embeddings=True)
    layers = llama_layers(config, gptq_body, head=False)
    embedding = layers["model.embed_tokens.weight"]
    assert isinstance(embedding, torch.Tensor)
    folder = write_llama(
        tmp_path / "model", config, {**layers, "lm_head.weight": embedding.clone()}, BASE.config
    )
    check_llama(folder, config, layers)


def test_tied_and_one_tensor(tmp_path: Path) -> None:
    config = llama_config(tie_word_embeddings=True)
    layers = llama_layers(config, gptq_body, head=False)
    folder = write_llama(tmp_path / "model", config, layers, BASE.config)
    check_llama(folder, config, layers)


def test_b65_no_head_at_all(tmp_path: Path) -> None:
    """Both remedies are named: tie the head, or get the tensor."""
    config = llama_config(tie_word_embeddings=False)
    layers = llama_layers(config, gptq_body, head=False)
    folder = write_llama(tmp_path / "model", config, layers, BASE.config)
    with pytest.raises(SchemeError) as caught:
        qcompile.load(folder)
    checked(caught.value, "add lm_head.weight", "set tie_word_embeddings")


# **** B67: a quantized head ****


@pytest.mark.parametrize("flag", [True, False])
def test_b67_a_quantized_head_of_gptq(tmp_path: Path, flag: bool) -> None:
    """What is stored quantized runs quantized, even where the config denies it."""
    config = llama_config(vocab_size=1024)
    layers = llama_layers(config, gptq_all)
    folder = write_llama(tmp_path / "model", config, layers, {**BASE.config, "lm_head": flag})
    model = check_llama(folder, config, layers)
    sites = {entry.site.weight.name: entry for entry in model.qcompile.plan.entries}
    assert sites["lm_head.weight"].kernel


def test_b67_a_head_with_its_own_rule(tmp_path: Path) -> None:
    def pack(name: str, n: int, k: int, seed: int) -> Packed | None:
        return gptq(n, k, Gptq(8, 64) if name == "lm_head" else BASE, seed)

    config = llama_config(vocab_size=1024)
    layers = llama_layers(config, pack)
    rules = {"lm_head": {"bits": 8, "group_size": 64, "mse": 2.4}}
    quantization = {**BASE.config, "lm_head": True, "dynamic": rules}
    folder = write_llama(tmp_path / "model", config, layers, quantization)
    check_llama(folder, config, layers)


def test_b67_a_quantized_head_of_a_tied_model(tmp_path: Path) -> None:
    """The embedding is float, the head is not: both as they are stored, or refused."""
    config = llama_config(tie_word_embeddings=True)
    layers = llama_layers(config, gptq_body, head=False)
    layers["lm_head"] = gptq(128, 64, BASE)
    quantization = {**BASE.config, "lm_head": True}
    folder = write_llama(tmp_path / "model", config, layers, quantization)
    try:
        found = qcompile.load(folder, emitter="eager")[0](IDS).logits
    except SchemeError as error:
        checked(error, "lm_head")
        return
    free = llama_config(tie_word_embeddings=False)
    assert relative_l2(found, exact_llama(free, layers)(IDS).logits) < BOUND


def test_b67_a_quantized_head_of_awq(tmp_path: Path) -> None:
    config = llama_config()
    layers = llama_layers(config, lambda name, n, k, seed: awq(n, k, Awq(32), seed))
    folder = write_llama(tmp_path / "model", config, layers, Awq(32).config)
    check_llama(folder, config, layers)


def test_b67_a_quantized_head_of_compressed_tensors(tmp_path: Path) -> None:
    what = Compressed(4, 32)
    config = llama_config()
    layers = llama_layers(config, lambda name, n, k, seed: pack_quantized(n, k, what, seed))
    groups = {"group_0": (["Linear"], integer_weights(what))}
    quantization = compressed_config("pack-quantized", groups)
    folder = write_llama(tmp_path / "model", config, layers, quantization)
    check_llama(folder, config, layers)


# **** B69: an embedding of any type ****


class Lookup(nn.Module):
    def __init__(self, columns: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, columns)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.embed(ids)
        return out


EMBEDDINGS = [
    (type, columns)
    for columns, types in {
        256: ("F32", "F16", "BF16", "Q4_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K"),
        96: ("F32", "F16", "BF16", "Q4_0", "Q5_1", "Q8_0"),
    }.items()
    for type in types
]


@pytest.mark.parametrize(("type", "columns"), EMBEDDINGS)
def test_b69_rows_of_an_embedding(tmp_path: Path, type: str, columns: int) -> None:
    """Gathered rows are those that gguf-py decodes, bit for bit."""
    kind = gguf.GGMLQuantizationType[type]
    data: Any
    if type.lower() in BLOCKS:
        data = finite_bytes(type.lower(), 40, columns // BLOCKS[type.lower()].spec.elements).numpy()
    else:
        drawn = np.random.default_rng(0).normal(0, 1, (40, columns)).astype(np.float32)
        data = gguf.quantize(drawn, kind)
    expected = torch.from_numpy(gguf.dequantize(data, kind).astype(np.float32))
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(str(path), "plain")
    writer.add_tensor("embed.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    torch._dynamo.reset()
    model = qcompile.optimize(Lookup(columns), checkpoint=path, emitter="eager")
    ids = torch.tensor([[0, 39, 7], [7, 0, 1]])
    assert torch.equal(model(ids), expected.view(40, columns)[ids])
