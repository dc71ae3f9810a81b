"""Graphs that take named inputs alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from qcompile.bind_inputs import Copies, bind_inputs
from qcompile.errors import CaptureError


def traced(function: Any, *given: Any) -> tuple[fx.GraphModule, list[Any]]:
    """What dynamo hands to a backend: the graph and its inputs."""
    found: list[Any] = []

    def keep(module: fx.GraphModule, inputs: Any) -> Any:
        found.append((module, list(inputs)))
        return module.forward

    torch._dynamo.reset()
    compiler: Any = torch.compile
    compiler(function, backend=keep, fullgraph=True, dynamic=False)(*given)
    ((module, inputs),) = found
    return module, inputs


def bound(
    function: Any, named: dict[str, torch.Tensor], copies: Copies | None = None
) -> tuple[fx.GraphModule, tuple[str, ...]]:
    module, inputs = traced(function, *named.values())
    values = dict(zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True))
    names = {id(tensor): name for name, tensor in named.items()}
    copy, fakes, places = bind_inputs(module, values, names, {} if copies is None else copies)
    assert len(fakes) == len(places) == len(copy.graph.find_nodes(op="placeholder"))
    return copy, places


def rows(count: int) -> torch.Tensor:
    found = torch.randn(count, 4)
    torch._dynamo.mark_dynamic(found, 0, min=2, max=64)
    return found


def test_parameters_are_held_and_sizes_read_off() -> None:
    layer = torch.nn.Linear(4, 4)

    def forward(x: torch.Tensor) -> Any:
        return layer(x) + x.shape[0], torch.arange(x.shape[0])

    copy, places = bound(forward, {"x": rows(8)})
    assert places == ("x",)
    for count in (8, 3):
        x = torch.randn(count, 4)
        found = copy(x)
        torch.testing.assert_close(found[0], layer(x) + count)
        assert found[1].tolist() == list(range(count))
    held = [getattr(copy, str(n.target)) for n in copy.graph.find_nodes(op="get_attr")]
    assert {tensor.data_ptr() for tensor in held} == {p.data_ptr() for p in layer.parameters()}


def test_only_what_is_named_is_an_input() -> None:
    weight, kept = torch.randn(4), torch.zeros(8, 4)

    def forward(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        cache.copy_(x * weight)
        return cache.sum()

    copy, places = bound(forward, {"x": torch.randn(8, 4), "0": kept})
    assert sorted(places) == ["0", "x"]
    given = {"x": torch.randn(8, 4), "0": torch.zeros(8, 4)}
    copy(*(given[place] for place in places))
    torch.testing.assert_close(given["0"], given["x"] * weight)


def test_what_does_not_lie_in_rows_is_copied_once_for_all_graphs() -> None:
    weight, copies = torch.nn.Parameter(torch.randn(4, 6).t()), Copies()
    made = [
        bound(lambda x, plus=plus: x @ weight + plus, {"x": torch.randn(3, 6)}, copies)[0]
        for plus in (0, 1)
    ]
    held = [getattr(m, str(m.graph.find_nodes(op="get_attr")[0].target)) for m in made]
    assert held[0] is held[1]
    assert held[0].is_contiguous()
    x = torch.randn(3, 6)
    for plus, module in enumerate(made):
        torch.testing.assert_close(module(x)[0], x @ weight + plus)


def test_a_part_of_a_tensor_is_held_as_it_is() -> None:
    whole = torch.randn(6, 4)
    part = whole[2:4]
    copy, _ = bound(lambda x: x + part, {"x": torch.randn(2, 4)})
    assert torch.equal(copy(torch.zeros(2, 4))[0], part)


def test_inputs_without_a_name_for_their_size() -> None:
    other = rows(8)
    module, inputs = traced(lambda x: other.sum() + x * other.shape[0], torch.randn(2))
    nodes = module.graph.find_nodes(op="placeholder")
    values = dict(zip(nodes, inputs, strict=True))
    assert any(isinstance(value, torch.SymInt) for value in inputs)
    given = next(value for value in inputs if value is not other and torch.is_tensor(value))
    with pytest.raises(CaptureError, match=r"input \w+ of the graph: s\d+"):
        bind_inputs(module, values, {id(given): "x"}, {})


def test_a_graph_inside_is_refused() -> None:
    def forward(x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))

    with pytest.raises(CaptureError, match="a GraphModule"):
        bound(forward, {"x": torch.randn(3)})


def test_the_graph_that_was_given_is_left_alone() -> None:
    weight = torch.randn(4)
    module, inputs = traced(lambda x: x * weight, torch.randn(4))
    before = str(module.graph)
    values = dict(zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True))
    bind_inputs(module, values, {id(inputs[0]): "x"}, {})
    assert str(module.graph) == before
