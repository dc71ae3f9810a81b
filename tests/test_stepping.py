"""Graphs of an artifact: what is found of them while they are traced."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.artifacts import gguf_model
from test_hf_step import random_model
from torch._guards import detect_fake_mode

import qcompile
from qcompile.errors import CaptureError, LowerError, OptionError
from qcompile.stepping import ROWS, check_rows, example, trace_graphs


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model: Any) -> Any:
    options: Any = {"scheme": "rtn", "bits": 8, "group_size": 32, "emitter": "eager"}
    return qcompile.optimize(model, **options)


def graphs(model: Any, context: int = 600) -> Any:
    ids, _, caches = example(model, context)
    return trace_graphs(model, model.qcompile, ids, caches, lambda what: None)


def call(traced: Any, ids: torch.Tensor, caches: list[torch.Tensor]) -> torch.Tensor:
    """The graph itself, operator by operator."""
    given = {"ids": ids[None], "positions": torch.arange(len(ids))}
    found: torch.Tensor
    with torch.no_grad():
        (found,) = traced.module(
            *(given.get(n) if n in given else caches[int(n)] for n in traced.names)
        )
    return found[0, -1]


def test_sizes_are_numbers_whatever_was_traced_before(tmp_path: Path) -> None:
    file = gguf_model(tmp_path / "m.gguf", "llama", {"attn_q.weight": "Q8_0"})
    model: Any = qcompile.load(file, emitter="eager")[0]
    for context in (600, 512):
        for name, traced in graphs(model, context).items():
            shapes = dict(zip(traced.names, (tuple(x.shape) for x in traced.inputs), strict=True))
            assert shapes["0"] == shapes["1"] == (1, 2, context, 16)
            assert all(type(size) is int for size in shapes["0"])
            rows = shapes["positions"][0]
            assert rows == 1 if name == "step" else isinstance(rows, torch.SymInt)
            check_rows(traced, name)


def test_what_was_traced_for_some_rows_only(tmp_path: Path) -> None:
    file = gguf_model(tmp_path / "m.gguf", "llama", {"attn_q.weight": "Q8_0"})
    model: Any = qcompile.load(file, emitter="eager")[0]
    traced = graphs(model)["prompt"]
    symbol: Any = dict(zip(traced.names, traced.inputs, strict=True))["positions"].shape[0]
    assert symbol + 1 > ROWS[0]  # known: no guard
    check_rows(traced, "prompt")
    assert bool(symbol < 500)  # a branch that a compiler takes by the example's size
    with pytest.raises(
        LowerError, match=r"code for prompt: it holds for rows with s\d+ < 500 only"
    ):
        check_rows(traced, "prompt")


def test_a_context_beyond_a_table_of_positions() -> None:
    model = compiled(
        random_model("opt", ffn_dim=96, word_embed_proj_dim=64, max_position_embeddings=600)
    )
    graphs(model, 600)
    with pytest.raises(OptionError, match="context=700: OPTForCausalLM has no such position"):
        graphs(model, 700)


class Remembers(torch.nn.Module):
    """A rotary embedding that counts its calls."""

    def __init__(self, inner: Any, how: str) -> None:
        super().__init__()
        self.inner, self.how = inner, how
        self.register_buffer("seen", torch.zeros(2), persistent=False)
        self.last: Any = None

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        seen: Any = self.seen
        if self.how == "counts":
            seen.add_(1)
        elif self.how == "overwrites":
            seen.copy_(position_ids[0, :1].float() * 0)
        else:
            self.last = position_ids + 1
        cos, sin = self.inner(x, position_ids)
        return cos + seen[0] * 0, sin


@pytest.mark.parametrize(
    ("how", "told"), [("counts", "held_"), ("attribute", "its forward changes")]
)
def test_a_model_that_remembers_more(how: str, told: str) -> None:
    model = random_model("llama")
    model.model.rotary_emb = Remembers(model.model.rotary_emb, how)
    with pytest.raises(CaptureError, match=told):
        graphs(compiled(model))


def test_a_buffer_that_is_overwritten_first() -> None:
    """As ``longrope`` does it: nothing is kept, so every call has a buffer of its own."""
    model = random_model("llama", num_hidden_layers=1)
    model.model.rotary_emb = Remembers(model.model.rotary_emb, "overwrites")
    model = compiled(model)
    ids, expected, caches = example(model, 600)
    found = trace_graphs(model, model.qcompile, ids, caches, lambda what: None)
    for traced in found.values():
        before = {name: value._version for name, value in traced.constants.items()}
        count = 1 if traced.inputs[0].shape[0] == 1 else 20
        logits = call(traced, ids[:count], [cache.clone().zero_() for cache in caches])
        torch.testing.assert_close(logits, expected[count - 1], rtol=1e-4, atol=1e-5)
        assert before == {name: value._version for name, value in traced.constants.items()}


def test_caches_of_several_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    from qcompile import hf_step

    def mixed(kept: Any, context: int, model: str) -> list[torch.Tensor]:
        return [torch.zeros(1, 2, context, 16, dtype=d) for d in (torch.float32, torch.float16)]

    monkeypatch.setattr(hf_step, "empty_caches", mixed)
    with pytest.raises(CaptureError, match="several dtypes"):
        example(random_model("llama"), 600)


def _facts() -> tuple[Any, ...]:
    config: Any = torch._dynamo.config
    fast = torch.backends.mha.get_fastpath_enabled()
    return config.recompile_limit, config.specialize_float, fast, torch.is_grad_enabled()


def test_nothing_of_the_process_is_changed(tmp_path: Path) -> None:
    file = gguf_model(tmp_path / "m.gguf", "llama", {"attn_q.weight": "Q8_0"})
    model: Any = qcompile.load(file, emitter="eager")[0]
    before, ids = _facts(), torch.arange(12)[None]
    expected = model(ids).logits
    traced = graphs(model)
    assert _facts() == before
    assert torch.equal(model(ids).logits, expected)
    mode: Any = detect_fake_mode(list(traced["step"].inputs))
    assert mode.allow_non_fake_inputs is False
