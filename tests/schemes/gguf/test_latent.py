"""DeepSeek-V2 and V3 from GGUF files: their attention and their routing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import gguf_mixtures
from support.gguf_exact import TYPES, agree, decoded, exact, load, small
from support.gguf_writer import tiny_model, write_model

import qcompile
from qcompile.errors import SchemeError
from qcompile.schemes.gguf.config import build_config
from qcompile.schemes.gguf.reader import GGUFFile

YARN = {
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}


@pytest.mark.parametrize("name", ["deepseek2", "deepseek3"])
def test_old_files_hold_keys_and_values_in_one_matrix(name: str, tmp_path: Path) -> None:
    source = small(name)
    config: Any = source.config
    old = {
        "attention.head_count_kv": 4,
        "attention.key_length": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length": config.v_head_dim,
        "attention.key_length_mla": None,
        "attention.value_length_mla": None,
    }
    metadata = {f"deepseek2.{key}": value for key, value in old.items()}

    def unsplit(stored: Any) -> Any:
        return gguf_mixtures.unsplit(stored, source)

    path = write_model(
        tmp_path / "m.gguf", name, source, metadata=metadata, types=TYPES, rename=unsplit
    )
    model = load(path)
    whole = {n: v for n, v in TYPES.items() if n not in ("attn_k_b.weight", "attn_v_b.weight")}
    expected = exact(name, source, whole)
    state = {
        n: torch.from_numpy(decoded("attn_kv_b.weight", p.numpy(), TYPES))
        for n, p in source.named_parameters()
        if "kv_b_proj" in n
    }
    expected.load_state_dict(state, strict=False)
    agree(model, expected, 7)
    entries = {e.site.name: e for e in model.qcompile.plan.entries}
    assert str(entries["model.layers.0.self_attn.kv_b_proj"].site.weight.spec) == "q8_0"


def test_halves_beside_the_whole_are_passed_over(tmp_path: Path) -> None:
    source = small("deepseek2")

    def both(stored: Any) -> Any:
        return {**stored, **gguf_mixtures.unsplit(stored, source)}

    path = write_model(tmp_path / "m.gguf", "deepseek2", source, types=TYPES, rename=both)
    weight = qcompile.open(path).sites()
    assert "model.layers.1.self_attn.kv_b_proj" in [site.name for site in weight]


def test_the_split_matrix_is_decoded_and_the_plan_says_so(tmp_path: Path) -> None:
    source = small("deepseek2")
    path = write_model(tmp_path / "m.gguf", "deepseek2", source, types=TYPES)
    floats = {w.name: w for w in qcompile.open(path).floats()}
    weight = floats["model.layers.0.self_attn.kv_b_proj.weight"]
    assert "decoded from q8_0 and q5_0" in weight.facts
    assert torch.equal(weight.read(slice(3, 9)).dequantize(), weight.dequantize()[3:9])


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("deepseek2", {"q_lora_rank": None}),
        ("deepseek2", {"n_group": 2, "topk_group": 1, "topk_method": "group_limited_greedy"}),
        ("deepseek3", {"n_group": 1, "topk_group": 1}),
        ("deepseek3", {"norm_topk_prob": False}),
        ("deepseek2", {"first_k_dense_replace": 0}),
        ("deepseek2", {"rope_parameters": "yarn"}),
        ("deepseek3", {"rope_parameters": "yarn"}),
    ],
)
def test_variants_of_deepseek(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    if changes.get("rope_parameters") == "yarn":
        changes = {"rope_parameters": YARN}
    source = small(name, **changes)
    path = write_model(tmp_path / "m.gguf", name, source, types=TYPES)
    agree(load(path), exact(name, source, TYPES), 1, 60)


def test_yarn_without_a_multiplier_is_refused(tmp_path: Path) -> None:
    source = tiny_model("deepseek2", rope_parameters=YARN)
    key = "deepseek2.rope.scaling.yarn_log_multiplier"
    path = write_model(tmp_path / "m.gguf", "deepseek2", source, metadata={key: None})
    with pytest.raises(SchemeError, match="yarn_log_multiplier"):
        build_config(GGUFFile.open(path))
