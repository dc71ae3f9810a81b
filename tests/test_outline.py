"""A repeated layer is compiled once, and only where that is right."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn

from qcompile.outline import fingerprint, outline, without_graph

Given = tuple[Any, ...]


class Layer(nn.Module):
    def __init__(self, scale: float = 1.0, rounded: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.scale, self.rounded = scale, rounded

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        y = torch.tanh(x @ self.weight) * self.scale
        if self.rounded:
            y = y.to(torch.float16).to(torch.float32)
        return x + y if memory is None else x + y + (memory @ self.weight).sum(0)


class Stack(nn.Module):
    def __init__(self, layers: Sequence[Layer]) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(8)

    def forward(self, ids: torch.Tensor, memories: Sequence[torch.Tensor] = ()) -> torch.Tensor:
        x = self.embed(ids)
        for index, layer in enumerate(self.layers):
            x = layer(x, memories[index] if memories else None)
        out: torch.Tensor = self.norm(x)
        return out


def no_look(values: Sequence[Any]) -> None:
    """Compile without asking for a size."""


class Counter:
    """A compiler that counts its calls and may look at the sizes it is given."""

    def __init__(self, look: Callable[[Sequence[Any]], None] = no_look) -> None:
        self.graphs: list[fx.GraphModule] = []
        self.look = look

    def __call__(self, graph_module: fx.GraphModule, values: Sequence[Any]) -> Callable[..., Any]:
        self.graphs.append(graph_module)
        self.look(values)
        return graph_module.forward


def run(model: nn.Module, counter: Counter, *given: Any) -> Any:
    """The model, outlined, on each of the inputs; the last result."""
    torch._dynamo.reset()
    model = model.eval().requires_grad_(False)

    def backend(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return outline(graph_module, inputs, counter)

    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    for one in given:
        with torch._dynamo.config.patch(specialize_float=True):  # as ``optimize`` compiles
            expected, found = model(*one), compiled(*one)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    return found


def layers_of(counter: Counter) -> list[fx.GraphModule]:
    return [g for g in counter.graphs if any(n.target is torch.tanh for n in g.graph.nodes)]


IDS: Given = (torch.tensor([[1, 2, 3]]),)


def test_four_like_layers_are_compiled_once() -> None:
    counter = Counter()
    run(Stack([Layer() for _ in range(4)]), counter, IDS, (torch.tensor([[4, 5, 6, 7, 8]]),))
    assert len(layers_of(counter)) == 1
    assert len(counter.graphs) == 3  # what comes before, a layer, what comes after


@pytest.mark.parametrize("odd", [Layer(scale=2.0), Layer(rounded=True)])
def test_another_layer_is_compiled_apart(odd: Layer) -> None:
    counter = Counter()
    run(Stack([Layer(), odd, Layer(), odd]), counter, IDS)
    assert len(layers_of(counter)) == 2


def test_layers_of_other_shapes_are_compiled_apart() -> None:
    counter = Counter()
    model = nn.Sequential(*(nn.Linear(k, n) for k, n in ((8, 8), (8, 8), (8, 4), (4, 8), (8, 8))))
    run(model, counter, (torch.randn(3, 8),))
    assert len(counter.graphs) == 3


def memories(*lengths: int) -> list[torch.Tensor]:
    return [torch.randn(length, 8) for length in lengths]


def test_layers_that_differ_in_the_name_of_a_size_share_code() -> None:
    # Sizes that are equal at first would share one symbol: all are different here.
    counter = Counter()
    model = Stack([Layer() for _ in range(4)])
    given = [(IDS[0], memories(4, 5, 6, 7)), (IDS[0], memories(7, 2, 9, 11))]
    run(model, counter, *given)
    assert len(layers_of(counter)) == 1


def sizes(values: Sequence[Any]) -> None:
    """Ask for every symbolic size, as a compiler that specializes does."""
    for value in values:
        if isinstance(value, torch.Tensor):
            for extent in value.shape:
                if isinstance(extent, torch.SymInt):
                    bool(extent > 5)


def test_code_that_asked_for_a_size_is_not_shared_across_sizes() -> None:
    counter = Counter(look=sizes)
    model = Stack([Layer() for _ in range(4)])
    run(model, counter, (IDS[0], memories(3, 4, 6, 7)), (IDS[0], memories(7, 2, 9, 3)))
    # Each length was asked for: no two layers may share, in either of the compiled graphs.
    assert len(layers_of(counter)) == 8


def test_a_graph_without_layers_is_compiled_whole() -> None:
    counter = Counter()
    run(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), counter, (torch.randn(3, 8),))
    assert len(counter.graphs) == 1


def traced(formula: Callable[..., torch.Tensor], *given: torch.Tensor) -> fx.Graph:
    seen: list[fx.Graph] = []

    def backend(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        seen.append(graph_module.graph)
        return graph_module.forward

    torch._dynamo.reset()
    torch.compile(formula, backend=backend, dynamic=True)(*given)
    return seen[0]


def test_fingerprints_tell_constants_dtypes_and_inputs_apart() -> None:
    x, y = torch.randn(3, 4), torch.randn(5, 4)
    graphs = [
        traced(lambda x, y: x.sum(0) + y.sum(0) * 2, x, y),
        traced(lambda x, y: x.sum(0) + y.sum(0) * 3, x, y),
        traced(lambda x, y: x.sum(0) * 2 + y.sum(0), x, y),
        traced(lambda x, y: x.sum(0) + y.to(torch.float16).sum(0) * 2, x, y),
        traced(lambda x, y: x.sum(0) + y.to(torch.bfloat16).sum(0) * 2, x, y),
        traced(lambda x, y: x.sum(0) + y.sum(0) * 2, x.double(), y),
        traced(lambda x, y: x.sum(0) + y.sum(0) * 2, x, y.T.contiguous().T),
        traced(lambda x, y: x.sum(0) + y.sum(0) * 2, x, x),
        traced(lambda x, y: x.sum(0) + y.sum(0) * 2, x, torch.randn(3, 4)),
    ]
    exact, renamed = zip(*map(fingerprint, graphs), strict=True)
    assert len(set(exact[:8])) == len(set(renamed[:8])) == 8


def test_fingerprints_do_not_see_the_names_of_sizes() -> None:
    def formula(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, y, z])

    graph = traced(formula, torch.randn(3, 4), torch.randn(5, 4), torch.randn(6, 4))
    tensors = [
        node
        for node in graph.find_nodes(op="placeholder")
        if isinstance(node.meta["example_value"], torch.Tensor)
    ]
    made = []
    for node in tensors[1:]:
        small = fx.Graph()
        x = small.placeholder("x")
        x.meta["example_value"] = node.meta["example_value"]
        small.output((small.call_method("abs", (x,)),))
        made.append(fingerprint(small))
    assert made[0][0] != made[1][0]
    assert made[0][1] == made[1][1]


def test_compiled_regions_keep_nothing_of_the_trace() -> None:
    counter = Counter()
    run(Stack([Layer() for _ in range(4)]), counter, IDS)
    assert len(counter.graphs) > 1
    assert not any(node.meta for graph in counter.graphs for node in graph.graph.nodes)


def test_code_runs_without_its_graph() -> None:
    graph_module = fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    graph, x = weakref.ref(graph_module.graph), torch.randn(3, 8)
    expected, code = graph_module(x), without_graph(graph_module)
    del graph_module
    gc.collect()
    assert graph() is None
    assert torch.equal(code(x), expected)


def test_a_decorated_forward_is_outlined_too() -> None:
    """Below a decorator dynamo calls the model ``args[0]``, which is no layer."""

    class Decorated(Stack):
        def forward(self, *args: Any) -> torch.Tensor:
            return Stack.forward(self, *args)

    def decorated(*args: Any) -> torch.Tensor:
        out: torch.Tensor = Decorated.forward(*args)
        return out

    counter = Counter()
    model = Decorated([Layer() for _ in range(4)])
    model.forward = functools.partial(decorated, model)  # type: ignore[method-assign]
    run(model, counter, IDS)
    assert len(counter.graphs) == 3
