"""Native attention beside torch's own definition in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.threads import assert_same_on_threads
from torch import fx
from torch.nn import functional

from qcompile import backends
from qcompile.backends.cpu.attention import NativeAttention
from qcompile.backends.cpu.probe import find_compiler
from qcompile.program import Program

pytestmark = pytest.mark.skipif(not find_compiler(), reason="no C++ compiler")
if find_compiler():
    backends.load("cpu").prepare()
OP = torch.ops.qcompile_cpu.attention.default
# The errors of the dtypes themselves; scores and sums are float32.
ERRORS = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}
MASKS = ("none", "causal", "bool", "one head", "blind", "half", "added", "lowest", "row", "causal+")
# Batch, heads, shared by, queries, keys, columns of keys and of values.
SHAPES = [
    (1, 4, 4, 1, 70, 64, 64),  # decoding: few rows
    (2, 6, 3, 2, 13, 32, 48),
    (1, 8, 8, 1, 1, 16, 16),
    (2, 3, 1, 7, 65, 16, 80),
    (1, 4, 4, 33, 130, 64, 64),  # a prompt: tiles, the last of them not full
    (2, 3, 1, 17, 17, 16, 16),
    (1, 4, 2, 150, 200, 128, 32),  # more rows than a task has
]


def mask_of(kind: str, b: int, h: int, m: int, length: int) -> tuple[torch.Tensor | None, bool]:
    if kind in ("none", "causal"):
        return None, kind == "causal"
    seen = torch.rand(b, h if kind == "bool" else 1, m, length) < 0.7
    if kind == "blind":
        seen[:, :, 0] = False
    if kind == "half":
        seen = (torch.arange(length) < (length + 1) // 2)[None, None, None].expand(b, 1, m, length)
    if kind == "row":
        return seen[0, 0, :1], False  # two dimensions, shared by all queries
    if kind in ("added", "lowest"):
        low = -torch.inf if kind == "added" else float(torch.finfo(torch.float32).min)
        return torch.where(seen, torch.randn(b, 1, m, length), low), False
    return seen, kind == "causal+"


def expected_of(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool
) -> torch.Tensor:
    """By the definition: torch refuses a mask beside is_causal."""
    times = q.shape[1] // k.shape[1]
    wide = [x.double().expand(len(q), -1, -1, -1).repeat_interleave(times, 1) for x in (k, v)]
    scores = q.double() @ wide[0].transpose(-1, -2) * 0.3
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    return torch.softmax(scores, -1).nan_to_num(0) @ wide[1]


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", list(ERRORS), ids=str)
def test_the_error_against_float64(dtype: torch.dtype, shape: tuple[int, ...], kind: str) -> None:
    torch.manual_seed(0)
    b, h, times, m, length, d, e = shape
    q = torch.randn(b, m, h, d).to(dtype).transpose(1, 2)
    k, v = (torch.randn(b, h // times, length, n).to(dtype) for n in (d, e))
    mask, causal = mask_of(kind, b, h, m, length)
    if mask is not None and mask.dtype != torch.bool and dtype != torch.float16:
        mask = mask.to(dtype)  # masks of another dtype than the queries' are read as well
    expected = expected_of(q, k, v, mask, causal)
    found = OP(q, k, v, mask, causal, 0.3)
    assert found.dtype == dtype
    assert found.shape == expected.shape
    assert found.transpose(1, 2).is_contiguous()
    assert float((found - expected).norm()) <= ERRORS[dtype] * float(expected.norm())


def test_tensors_that_lie_otherwise() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, 40, 32) for n in (4, 2, 2))
    mask = torch.rand(2, 1, 40, 40) < 0.7
    expected = OP(q, k, v, mask, False, 0.3)
    cache = torch.randn(2, 2, 64, 32)
    cache[:, :, :40] = k
    columns = v.transpose(2, 3).contiguous().transpose(2, 3)
    turned = mask.transpose(2, 3).contiguous().transpose(2, 3)
    found = OP(
        q.transpose(1, 2).contiguous().transpose(1, 2),
        cache[:, :, :40],
        columns,
        turned,
        False,
        0.3,
    )
    assert torch.equal(found, expected)


def test_threads_change_nothing() -> None:
    q, k = torch.randn(1, 6, 50, 32), torch.randn(1, 3, 90, 32)
    assert_same_on_threads(lambda: OP(q, k, k, None, True, 0.3))


@pytest.mark.parametrize("m", [1, 40])
def test_nothing_of_a_masked_key_is_read_but_a_nan_that_is_seen_stays(m: int) -> None:
    q, k = torch.randn(1, 2, m, 16), torch.randn(1, 2, 200, 16)
    seen = torch.arange(200)[None] < 64
    clean = OP(q, k, k, seen, False, 0.3)
    k[:, :, 128:] = torch.nan  # as in memory that a cache has not filled
    assert torch.equal(OP(q, k, k, seen, False, 0.3), clean)
    k[:, 1, 5] = torch.nan
    found = OP(q, k, k, seen, False, 0.3)
    assert torch.equal(found[:, 0], clean[:, 0])
    assert found[:, 1].isnan().all()


def test_the_op_is_well_formed() -> None:
    q, k = torch.randn(1, 4, 9, 16).bfloat16(), torch.randn(1, 2, 12, 16).bfloat16()
    torch.library.opcheck(OP, (q, k, k, None, False, 0.3))


@pytest.mark.parametrize(
    ("shapes", "mask"),
    [
        (((1, 4, 9, 16), (1, 3, 12, 16), (1, 3, 12, 16)), None),
        (((1, 4, 9, 16), (1, 2, 12, 32), (1, 2, 12, 16)), None),
        (((1, 4, 9, 16), (1, 2, 12, 16), (1, 2, 11, 16)), None),
        (((3, 4, 9, 16), (2, 2, 12, 16), (2, 2, 12, 16)), None),
        (((1, 4, 9, 24), (1, 2, 12, 24), (1, 2, 12, 24)), None),
        (((4, 9, 16), (2, 12, 16), (2, 12, 16)), None),
        (((1, 4, 9, 16), (1, 2, 12, 16), (1, 2, 12, 16)), (1, 1, 9, 11)),
    ],
)
def test_what_does_not_fit_is_refused(
    shapes: tuple[tuple[int, ...], ...], mask: tuple[int, ...] | None
) -> None:
    q, k, v = (torch.randn(shape) for shape in shapes)
    with pytest.raises(RuntimeError, match="qcompile_cpu"):
        OP(q, k, v, None if mask is None else torch.ones(mask, dtype=torch.bool), False, 0.3)


@pytest.mark.parametrize(("batch", "queries"), [(0, 4), (2, 0), (2, 4)])
def test_empty_batches_and_keys_for_a_whole_batch(batch: int, queries: int) -> None:
    q, k = torch.randn(batch, 4, queries, 16).bfloat16(), torch.randn(1, 4, 5, 16).bfloat16()
    found = OP(q, k, k, None, False, 0.3)
    torch.testing.assert_close(
        found.double(), expected_of(q, k, k, None, False), rtol=2e-2, atol=2e-2
    )


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
    assert NativeAttention().run(program) == 1
    program.graph_module.recompile()
    torch.testing.assert_close(program.graph_module(q, q, q), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("q", "settings"),
    [
        (torch.randn(1, 2, 9, 16).double(), {}),
        (torch.randn(1, 2, 9, 24), {}),
        (torch.randn(1, 2, 9, 16).bfloat16(), {"dropout_p": 0.1}),
        (torch.randn(2, 9, 16).bfloat16(), {}),
    ],
    ids=["float64", "odd columns", "dropout", "three dimensions"],
)
def test_what_stays_with_torch(q: torch.Tensor, settings: dict[str, Any]) -> None:
    assert NativeAttention().run(traced(q, **settings)) == 0


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_what_needs_gradients_stays_with_torch(which: str) -> None:
    program = traced(torch.randn(1, 2, 9, 16).bfloat16())
    for node in program.graph.find_nodes(op="placeholder"):
        if node.name == which:
            node.meta["example_value"] = torch.randn(1, 2, 9, 16).bfloat16().requires_grad_()
    assert NativeAttention().run(program) == 0


@pytest.mark.parametrize(
    ("shapes", "changed"),
    [
        (((3, 4, 9, 16), (1, 2, 9, 16), (1, 2, 9, 16)), 1),
        (((1, 1, 9, 16), (1, 2, 9, 16), (1, 2, 9, 16)), 0),
        (((1, 2, 9, 16), (1, 2, 9, 16), (1, 1, 9, 16)), 0),
        (((1, 2, 9, 16), (3, 2, 9, 16), (3, 2, 9, 16)), 0),
    ],
    ids=["shared keys", "one query head", "one value head", "one query batch"],
)
def test_what_torch_repeats_stays_with_torch(
    shapes: tuple[tuple[int, ...], ...], changed: int
) -> None:
    program = traced(torch.empty(0))
    nodes = program.graph.find_nodes(op="placeholder")
    for node, shape in zip(nodes, shapes, strict=True):
        node.meta["example_value"] = torch.randn(shape)
    assert NativeAttention().run(program) == changed


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
    assert NativeAttention().run(program) == 1
    program.graph_module.recompile()
    found = program.graph_module(q, k, v)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_a_mask_is_read_as_it_was_before_it_was_expanded() -> None:
    class Model(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
            wide = seen.expand(2, 3, 4, 5)
            return functional.scaled_dot_product_attention(q, k, k, attn_mask=wide)

    graph_module = fx.symbolic_trace(Model())
    q, k, seen = torch.randn(2, 3, 4, 16), torch.randn(2, 3, 5, 16), torch.rand(4, 5) < 0.7
    seen[:, 0] = True
    expected = graph_module(q, k, seen)
    values = {"q": q, "k": k, "seen": seen, "expand": seen.expand(2, 3, 4, 5)}
    for node in graph_module.graph.nodes:
        node.meta["example_value"] = values.get(node.name, q)
    program = Program(graph_module)
    assert NativeAttention().run(program) == 1
    [call] = program.graph.find_nodes(
        op="call_function", target=torch.ops.qcompile_cpu.attention.default
    )
    assert call.args[3].name == "seen"
    program.graph_module.recompile()
    torch.testing.assert_close(program.graph_module(q, k, seen), expected, rtol=1e-5, atol=1e-6)


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
        node.meta["example_value"] = values.get(
            node.name, torch.empty(1, 6, 5, 16, dtype=torch.bfloat16)
        )
    program = Program(graph_module)
    assert NativeAttention().run(program) == 1
    program.graph_module.recompile()
    methods = [node.target for node in program.graph.nodes if node.op == "call_method"]
    assert methods == (["expand", "reshape"] if used else [])
    for found, wanted in zip(program.graph_module(q, k), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
