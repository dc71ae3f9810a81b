"""What is refused of GGUF files with a mixture of experts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support import gguf_mixtures
from support.gguf_writer import tiny_model, write_model

import qcompile
from qcompile.errors import SchemeError
from qcompile.schemes.gguf.config import build_config
from qcompile.schemes.gguf.reader import GGUFFile


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("qwen3moe", "expert_count", None),
        ("qwen3moe", "expert_count", 0),
        ("qwen3moe", "expert_used_count", None),
        ("qwen3moe", "expert_used_count", 5),
        ("qwen3moe", "expert_used_count", 0),
        ("qwen3moe", "expert_gating_func", 2),
        ("qwen3moe", "expert_weights_scale", 2.5),
        ("qwen3moe", "expert_weights_norm", 1),
        ("qwen3moe", "expert_group_count", 2),
        ("qwen3moe", "expert_shared_count", 1),
        ("qwen3moe", "leading_dense_block_count", 1),
        ("qwen3moe", "swiglu_clamp_exp", [1.0, 1.0, 1.0]),
        ("qwen3moe", "interleave_moe_layer_step", 2),
        ("qwen3moe", "nextn_predict_layers", 1),
        ("olmoe", "expert_feed_forward_length", 48),
        ("gpt-oss", "expert_weights_norm", True),
        ("gpt-oss", "attention.sliding_window", None),
        ("deepseek2", "expert_weights_norm", True),
        ("deepseek2", "expert_gating_func", 3),
        ("deepseek2", "expert_group_count", 3),
        ("deepseek2", "expert_group_used_count", 2),
        ("deepseek2", "leading_dense_block_count", 4),
        ("deepseek2", "leading_dense_block_count", None),
        ("deepseek2", "expert_shared_count", 0),
        ("deepseek2", "attention.kv_lora_rank", 16),
        ("deepseek2", "attention.head_count_kv", 2),
        ("deepseek2", "rope.dimension_count", 7),
        ("deepseek2", "attention.temperature_scale", 0.1),
    ],
)
def test_metadata_that_the_model_cannot_follow_is_refused(
    name: str, key: str, value: object, tmp_path: Path
) -> None:
    metadata = {f"{name}.{key}": value}
    path = write_model(tmp_path / "m.gguf", name, tiny_model(name), metadata=metadata)
    with pytest.raises(SchemeError) as caught:
        build_config(GGUFFile.open(path))
    told = "attention.key_length" if "kv_lora" in key or "rope" in key else key
    assert told in str(caught.value) or key in str(caught.value)


@pytest.mark.parametrize(
    ("drop", "words"),
    [
        ("blk.1.ffn_up.2.weight", ("blk.1", "no up matrix of expert 2")),
        ("blk.0.ffn_down.0.weight", ("blk.0", "no down matrix of expert 0")),
        ("blk.2.ffn_gate.3.weight", ("blk.2", "no gate matrix of expert 3")),
    ],
)
def test_a_missing_expert_is_named(drop: str, words: tuple[str, ...], tmp_path: Path) -> None:
    path = write_model(
        tmp_path / "m.gguf",
        "mixtral",
        tiny_model("mixtral"),
        rename=gguf_mixtures.one_by_one,
        drop=(drop,),
    )
    with pytest.raises(SchemeError) as caught:
        qcompile.open(path).sites()
    for word in words:
        assert word in str(caught.value)


def test_a_missing_or_surplus_matrix_is_named(tmp_path: Path) -> None:
    source = tiny_model("qwen3moe")
    dropped = ("blk.1.ffn_up_exps.weight",)
    path = write_model(tmp_path / "a.gguf", "qwen3moe", source, drop=dropped)
    with pytest.raises(SchemeError, match=r"blk\.1[\s\S]*no up matrices"):
        qcompile.open(path).sites()
    extra = {"blk.1.ffn_up.4.weight": np.ones((96, 64), dtype=np.float32)}
    mixed = tiny_model("mixtral")
    path = write_model(
        tmp_path / "b.gguf", "mixtral", mixed, rename=gguf_mixtures.one_by_one, extra=extra
    )
    with pytest.raises(SchemeError, match=r"matrix of expert 4[\s\S]*experts 0 to 3"):
        qcompile.open(path).sites()
    path = write_model(
        tmp_path / "c.gguf", "qwen3moe", source, metadata={"qwen3moe.expert_count": 5}
    )
    with pytest.raises(SchemeError, match=r"ffn_(gate|up)_exps[\s\S]*5 matrices"):
        qcompile.open(path).sites()
    extra = {"blk.0.ffn_up_exps.bias": np.ones((4, 32), dtype=np.float32)}
    path = write_model(tmp_path / "d.gguf", "qwen3moe", source, extra=extra)
    with pytest.raises(SchemeError, match=r"unused in the checkpoint[\s\S]*exps\.bias"):
        qcompile.open(path).sites()
    path = write_model(
        tmp_path / "e.gguf", "gpt-oss", tiny_model("gpt-oss"), drop=("blk.0.ffn_up_exps.bias",)
    )
    with pytest.raises(SchemeError, match=r"blk\.0[\s\S]*no biases"):
        qcompile.open(path).sites()
