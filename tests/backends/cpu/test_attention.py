"""Attention in two products, beside torch's own definition in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch.nn import functional

from qcompile import backends
from qcompile.backends.cpu import attention as module
from qcompile.backends.cpu.attention import SplitAttention, attention
from qcompile.program import Program

backends.load("cpu").prepare()
MASKS = ("none", "causal", "bool", "float", "one head", "blind")


def mask_of(kind: str, b: int, h: int, m: int, length: int) -> tuple[torch.Tensor | None, bool]:
    if kind in ("none", "causal"):
        return None, kind == "causal"
    seen = torch.rand(b, 1 if kind == "one head" else h, m, length) < 0.7
    if kind == "blind":
        seen[:, :, 1] = False
        return seen, False
    seen[..., 0] = True
    if kind == "float":
        return torch.where(seen, 0.0, -torch.inf).to(torch.bfloat16), False
    return seen, False


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("scores", [1 << 24, 100])
def test_the_error_against_float64(
    kind: str, heads: tuple[int, int], scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SCORES", scores)  # a few queries at a time, too
    torch.manual_seed(0)
    (h, g), b, m, length, d = heads, 2, 11, 13, 32
    q, k, v = (
        torch.randn(b, n, rows, d).bfloat16() for n, rows in ((h, m), (g, length), (g, length))
    )
    mask, causal = mask_of(kind, b, h, m, length)
    wide = mask.double() if mask is not None and mask.dtype != torch.bool else mask
    settings: Any = {"is_causal": causal, "scale": 0.3, "enable_gqa": True}
    expected = functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), wide, **settings
    )
    found = attention(q, k, v, mask, causal, 0.3)
    assert found.dtype == q.dtype
    assert float((found - expected).norm() / expected.norm()) < 1e-2
    assert torch.equal(
        found, attention(q.transpose(1, 2).contiguous().transpose(1, 2), k, v, mask, causal, 0.3)
    )


def test_the_op_is_well_formed() -> None:
    q, k = torch.randn(1, 4, 9, 16).bfloat16(), torch.randn(1, 2, 12, 16).bfloat16()
    torch.library.opcheck(attention, (q, k, k, None, False, None))


@pytest.mark.parametrize(("batch", "queries"), [(0, 4), (2, 0), (2, 4)])
def test_empty_batches_and_keys_for_a_whole_batch(batch: int, queries: int) -> None:
    q, k = torch.randn(batch, 4, queries, 16).bfloat16(), torch.randn(1, 4, 5, 16).bfloat16()
    expected = functional.scaled_dot_product_attention(q, k.expand(batch, -1, -1, -1), k)
    found = attention(q, k, k, None, False, None)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def traced(q: torch.Tensor, **settings: Any) -> Program:
    program = Program(fx.GraphModule(torch.nn.Module(), fx.Graph()))
    graph = program.graph
    inputs = [graph.placeholder(name) for name in "qkv"]
    for node in inputs:
        node.meta["example_value"] = q
    graph.output(
        graph.call_function(functional.scaled_dot_product_attention, tuple(inputs), settings)
    )
    program.graph_module.recompile()
    return program


@pytest.mark.parametrize("queries", [1, 9])
def test_attention_is_rewritten(queries: int) -> None:
    q = torch.randn(1, 2, queries, 16).bfloat16()
    program = traced(q, is_causal=True, scale=0.5)
    expected = program.graph_module(q, q, q)
    assert SplitAttention().run(program) == 1
    program.graph_module.recompile()
    torch.testing.assert_close(program.graph_module(q, q, q), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("q", "settings"),
    [
        (torch.randn(1, 2, 9, 16).half(), {}),
        (torch.randn(1, 2, 9, 16), {}),
        (torch.randn(1, 2, 9, 16).bfloat16(), {"dropout_p": 0.1}),
        (torch.randn(2, 9, 16).bfloat16(), {}),
    ],
    ids=["float16", "float32", "dropout", "three dimensions"],
)
def test_what_stays_with_torch(q: torch.Tensor, settings: dict[str, Any]) -> None:
    assert SplitAttention().run(traced(q, **settings)) == 0


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_what_needs_gradients_stays_with_torch(which: str) -> None:
    program = traced(torch.randn(1, 2, 9, 16).bfloat16())
    for node in program.graph.find_nodes(op="placeholder"):
        if node.name == which:
            node.meta["example_value"] = torch.randn(1, 2, 9, 16).bfloat16().requires_grad_()
    assert SplitAttention().run(program) == 0


def test_keys_repeated_beside_values_that_are_not() -> None:
    class Model(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            wide = k[:, :, None, :, :].expand(1, 2, 3, 5, 16).reshape(1, 6, 5, 16)
            return functional.scaled_dot_product_attention(q, wide, v)

    graph_module = fx.symbolic_trace(Model())
    q, k, v = (torch.randn(1, n, 5, 16).bfloat16() for n in (6, 2, 6))
    expected = graph_module(q, k, v)
    values: dict[Any, torch.Tensor] = {"k": k}
    for node in graph_module.graph.nodes:
        node.meta["example_value"] = values.get(node.name, q)
    program = Program(graph_module)
    assert SplitAttention().run(program) == 1
    program.graph_module.recompile()
    found = program.graph_module(q, k, v)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("used", [False, True])
def test_repeated_keys_are_read_once(used: bool) -> None:
    """Heads that share keys: the copies are gone unless something else reads them."""

    class Model(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor) -> Any:
            wide = k[:, :, None, :, :].expand(1, 2, 3, 5, 16).reshape(1, 6, 5, 16)
            out = functional.scaled_dot_product_attention(q, wide, wide, scale=0.3)
            return (out, wide) if used else (out, out)

    graph_module = fx.symbolic_trace(Model())
    q, k = torch.randn(1, 6, 4, 16).bfloat16(), torch.randn(1, 2, 5, 16).bfloat16()
    expected = graph_module(q, k)
    values: dict[Any, torch.Tensor] = {"q": q, "k": k}
    for node in graph_module.graph.nodes:
        node.meta["example_value"] = values.get(node.name, torch.empty(1, 6, 5, 16))
    program = Program(graph_module)
    assert SplitAttention().run(program) == 1
    program.graph_module.recompile()
    methods = [node.target for node in program.graph.nodes if node.op == "call_method"]
    assert methods == (["expand", "reshape"] if used else [])
    for found, wanted in zip(program.graph_module(q, k), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
