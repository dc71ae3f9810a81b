"""Every spelling in both dialects becomes the one canonical form and keeps its value."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from qcompile.capture import capture_dynamo, capture_export, parameter_names
from qcompile.passes import CANONICALIZE
from qcompile.program import Program

LINEAR = torch.ops.aten.linear.default
EMBEDDING = torch.ops.aten.embedding.default


class Wrapped(nn.Module):
    """A module with one weight, one bias and a given formula."""

    def __init__(self, formula: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(6, 4, generator=generator))
        self.bias = nn.Parameter(torch.randn(6, generator=generator))
        self.formula = formula

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.formula(x, self.weight, self.bias)


LINEARS: dict[str, Callable[..., torch.Tensor]] = {
    "functional": lambda x, w, b: functional.linear(x, w, b),
    "keywords": lambda x, w, b: functional.linear(x, weight=w, bias=b),
    "no bias": lambda x, w, b: functional.linear(x, w) + b,
    "t": lambda x, w, b: torch.mm(x, w.t()) + b,
    "T": lambda x, w, b: x @ w.T + b,
    "transpose": lambda x, w, b: torch.matmul(x, w.transpose(0, 1)) + b,
    "transpose back": lambda x, w, b: torch.matmul(x, w.transpose(-1, -2)) + b,
    "permute": lambda x, w, b: x.matmul(w.permute(1, 0)) + b,
    "addmm": lambda x, w, b: torch.addmm(b, x, w.t()),
}
EMBEDDINGS: dict[str, Callable[..., torch.Tensor]] = {
    "functional": lambda ids, w, b: functional.embedding(ids, w),
    "padding": lambda ids, w, b: functional.embedding(ids, w, padding_idx=0),
    "index": lambda ids, w, b: w[ids],
}


def trace_dynamo(module: nn.Module, x: torch.Tensor) -> tuple[Program, list[object]]:
    """The program dynamo gives a backend, and the inputs it calls it with."""
    seen: list[tuple[Program, list[object]]] = []

    def backend(graph_module: torch.fx.GraphModule, inputs: list[object]) -> object:
        seen.append((capture_dynamo(graph_module, inputs, parameter_names(module)), inputs))
        return graph_module.forward

    torch._dynamo.reset()
    torch.compile(module, backend=backend, fullgraph=True)(x)
    return seen[0]


@pytest.mark.parametrize("dialect", ["dynamo", "export"])
@pytest.mark.parametrize("spelling", LINEARS)
def test_linear(spelling: str, dialect: str) -> None:
    check(Wrapped(LINEARS[spelling]), torch.randn(3, 4), LINEAR, dialect)


@pytest.mark.parametrize("dialect", ["dynamo", "export"])
@pytest.mark.parametrize("spelling", EMBEDDINGS)
def test_embedding(spelling: str, dialect: str) -> None:
    check(Wrapped(EMBEDDINGS[spelling]), torch.tensor([[0, 5], [2, 2]]), EMBEDDING, dialect)


def weight_of(program: Program, node: torch.fx.Node) -> str:
    used = node.args[1 if node.target is LINEAR else 0]
    assert isinstance(used, torch.fx.Node)
    return program.weights[used]


def check(module: Wrapped, x: torch.Tensor, target: object, dialect: str) -> None:
    expected = module(x).detach()
    if dialect == "dynamo":
        program, inputs = trace_dynamo(module, x)
    else:
        exported = torch.export.export(module, (x,))
        program = capture_export(exported)
        inputs = [*(exported.state_dict[n] for n in exported.graph_signature.parameters), x]
    for rewrite in CANONICALIZE:
        rewrite.run(program)
    program.check("canonicalize")
    [node] = program.nodes([target])
    assert weight_of(program, node) == "weight"
    program.graph.eliminate_dead_code()
    program.graph_module.recompile()
    found = program.graph_module(*inputs)[0]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "formula",
    [
        lambda x, w, b: x @ w.T.T.T * 1.0,
        lambda x, w, b: functional.embedding(x.abs().long() % 3, w, max_norm=1.0),
        lambda x, w, b: torch.addmm(b, x, w.t(), beta=2),
        lambda x, w, b: (w * 2).sum() + x,
    ],
)
def test_what_is_not_understood_is_left_alone(formula: Callable[..., torch.Tensor]) -> None:
    program, _ = trace_dynamo(Wrapped(formula).requires_grad_(False), torch.randn(3, 4))
    changed = [rewrite.run(program) for rewrite in CANONICALIZE]
    assert not any(changed)


def test_tied_weights_have_one_name() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(6, 4)
            self.head = nn.Linear(4, 6, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(self.embed(ids))
            return out

    exported = torch.export.export(Tied(), (torch.tensor([1, 2]),))
    for program in (
        trace_dynamo(Tied(), torch.tensor([1, 2]))[0],
        capture_export(exported),
    ):
        for rewrite in CANONICALIZE:
            rewrite.run(program)
        [linear], [embedding] = program.nodes([LINEAR]), program.nodes([EMBEDDING])
        assert weight_of(program, linear) == weight_of(program, embedding)
