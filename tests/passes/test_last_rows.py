"""Rows that nothing reads are not computed; those that are stay what they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.programs import check_golden
from torch import nn
from torch.nn import functional

from qcompile.capture import capture_dynamo, parameter_names
from qcompile.passes.canonicalize.last_rows import KeepLastRows
from qcompile.passes.canonicalize.linear import LINEAR, CanonicalizeLinear
from qcompile.program import Program

K = 8
texts: list[dict[str, str]] = []


class Layer(nn.Module):
    """A residual layer whose result a formula cuts."""

    up: torch.Tensor
    gate: torch.Tensor
    down: torch.Tensor

    def __init__(self, formula: Callable[..., Any]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name in ("up", "gate", "down"):
            weight = nn.Parameter(torch.randn(K, K, generator=generator) / 3)
            self.register_parameter(name, weight)
        self.scale = nn.Parameter(torch.randn(K, generator=generator))
        self.formula = formula

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide * (1.0 + self.scale.float())).type_as(x)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        gate = functional.silu(functional.linear(y, self.gate))
        return self.norm(x + functional.linear(gate * functional.linear(y, self.up), self.down))

    def forward(self, x: torch.Tensor) -> Any:
        return self.formula(self, x.exp())


def traced(formula: Callable[..., Any], x: torch.Tensor, dynamic: bool = True) -> tuple[Any, ...]:
    """The program after the pass, its results, those of the module, and how many nodes changed."""
    seen: list[tuple[Program, list[Any]]] = []
    module = Layer(formula)

    def backend(graph_module: torch.fx.GraphModule, inputs: list[Any]) -> object:
        plain = torch.fx.GraphModule(graph_module, graph_module.graph)
        program = capture_dynamo(plain, inputs, parameter_names(module))
        seen.append((program, inputs))
        return graph_module.forward

    torch._dynamo.reset()
    with torch.no_grad():
        expected = torch.compile(module, backend=backend, fullgraph=True, dynamic=dynamic)(x)
        program, inputs = seen[0]
        CanonicalizeLinear().run(program)
        before = str(program)
        changed = KeepLastRows().run(program)
        assert (str(program) == before) == (changed == 0)
        texts.append({"before": before, "after": str(program)})
        program.check("last rows")
        program.graph_module.recompile()
        found = program.graph_module(*inputs)
    return program, found, expected, changed


def linear_rows(program: Program) -> list[int | None]:
    """Rows of each product; None where they are a symbol."""
    shapes = [node.meta["example_value"].shape for node in program.nodes([LINEAR])]
    return [shape[1] if isinstance(shape[1], int) else None for shape in shapes]


CUTS: dict[str, tuple[Callable[..., Any], int]] = {
    "last": (lambda layer, x: layer.body(x)[:, -1:, :], 1),
    "two dimensions": (lambda layer, x: layer.body(x)[:, -1:], 1),
    "last three": (lambda layer, x: layer.body(x)[:, -3:, :], 3),
    "first": (lambda layer, x: layer.body(x)[:, :2, :], 2),
}


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("cut", CUTS)
def test_only_kept_rows_are_computed(cut: str, batch: int) -> None:
    formula, rows = CUTS[cut]
    program, (found,), expected, changed = traced(formula, torch.randn(batch, 7, K))
    assert changed > 10
    assert linear_rows(program) == [rows] * 3
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_text_before_and_after() -> None:
    traced(lambda layer, x: (x + functional.linear(x, layer.up))[:, -1:, :], torch.ones(2, 7, K))
    check_golden("canonicalize.last_rows", texts[-1])


KEPT: dict[str, Callable[..., Any]] = {
    "every row is a result too": lambda layer, x: (y := layer.body(x), y[:, -1:, :]),
    "every row": lambda layer, x: layer.body(x)[:, :, :],
    "rows a step apart": lambda layer, x: layer.body(x)[:, ::2, :],
    "columns": lambda layer, x: layer.body(x)[:, -1:, :4],
    "one row without its dimension": lambda layer, x: layer.body(x)[:, -1, :],
    "no product before": lambda layer, x: layer.norm(x)[:, -1:, :],
    "a sum over rows": lambda layer, x: (layer.body(x) + layer.body(x).sum(1, keepdim=True))[
        :, -1:
    ],
    "rows turned": lambda layer, x: layer.body(x).flip(1)[:, -1:, :],
    "a softmax over rows": lambda layer, x: torch.softmax(layer.body(x), 1)[:, -1:, :],
}


@pytest.mark.parametrize("cut", KEPT)
def test_other_graphs_stay(cut: str) -> None:
    program, found, expected, changed = traced(KEPT[cut], torch.randn(2, 7, K))
    assert changed == 0
    assert set(linear_rows(program)) <= {None}
    expected = expected if isinstance(expected, tuple) else (expected,)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_as_many_rows_as_there_are() -> None:
    *_, changed = traced(CUTS["last"][0], torch.randn(2, 1, K))
    assert changed == 0


def test_what_else_reads_every_row_keeps_them() -> None:
    def formula(layer: Any, x: torch.Tensor) -> Any:
        hidden = x + functional.linear(x, layer.up)
        return hidden, layer.body(hidden)[:, -1:, :]

    program, found, expected, changed = traced(formula, torch.randn(2, 7, K))
    assert changed > 0
    assert linear_rows(program) == [None, 1, 1, 1]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_a_write_in_between_is_seen() -> None:
    def formula(layer: Any, x: torch.Tensor) -> Any:
        y = functional.linear(x, layer.up) * 2
        x.add_(1)  # after y was made of it
        return layer.norm(y + x)[:, -1:, :]

    _, (found,), expected, changed = traced(formula, torch.randn(2, 7, K))
    assert changed > 0
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_a_function_in_place_keeps_every_row() -> None:
    def formula(layer: Any, x: torch.Tensor) -> Any:
        y = functional.linear(x, layer.up)
        return functional.silu(y, inplace=True)[:, -1:, :]

    *_, changed = traced(formula, torch.randn(2, 7, K))
    assert changed == 0
