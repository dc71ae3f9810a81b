"""Compile each repeated layer of a graph once.

Comes in: a lowered graph of a whole model and a compiler of graphs. Goes out: a callable.
Always holds: two regions share compiled code only if they are the same graph up to the names of
shape symbols and the tensors they are given, and if compiling added no guard on those symbols.

A decoder of 18 layers has two or three different layers at most. Handing the whole graph to
Inductor costs minutes; handing it the different layers costs seconds, in time and in memory.

Before::

    x = embed(ids); x = layer(x, w0, cache0); x = layer(x, w1, cache1); return head(x)

After::

    x = region_a(ids); x = region_b(x, w0, cache0); x = region_b(x, w1, cache1); return region_c(x)
"""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import free_symbols
from torch.fx.passes.split_module import split_module

from qcompile.observe import log
from qcompile.program import without_root

Compiler = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
Linker = Callable[[fx.GraphModule], Callable[..., Any]]

_WORTH_IT = 4  # regions: something before, two layers, something after
_LAYER = re.compile(r"(\[|\.)'?\d+'?(\]|\.|$)")


class Region(nn.Module):
    """Compiled code in the place of a part of a graph."""

    def __init__(self, compiled: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = compiled


def outline(
    graph_module: fx.GraphModule,
    inputs: Sequence[Any],
    compiler: Compiler,
    linker: Linker | None = None,
) -> Callable[..., Any]:
    """Compile a graph region by region.

    Args:
        graph_module: a graph whose nodes know their module (``nn_module_stack``).
        inputs: one for each placeholder.
        compiler: compiles one region.
        linker: makes a callable of a graph whose nodes are ``Region``s, what they give, constants
            and inputs; ``without_graph`` if None.
    """
    mode = _fake_mode(graph_module, inputs)
    if mode is None:
        return compiler(graph_module, inputs)
    regions = layer_regions(graph_module.graph)
    if len(set(regions.values())) < _WORTH_IT or not _can_split(graph_module):
        return _compiled_whole(graph_module, inputs, compiler, mode)
    # Constants become inputs of the regions: a region that held its own weights could not stand
    # for another layer.
    whole = split_module(graph_module, graph_module, regions.__getitem__, keep_original_order=True)
    shared: dict[str, Callable[..., Any]] = {}
    calls = [node for node in whole.graph.nodes if node.op == "call_module"]
    for node in calls:
        part = getattr(whole, str(node.target))
        whole.register_module(str(node.target), Region(_compiled(part, compiler, shared, mode)))
    log("passes", f"emit: {len(calls)} regions, {len(set(map(id, shared.values())))} different")
    return (linker or without_graph)(whole)


def without_graph(graph_module: fx.GraphModule) -> Callable[..., Any]:
    """The code of a graph and what it refers to; the graph, with all that tracing knew, can go."""
    # A plain module writes its code at once; dynamo's may write it when it is called.
    plain = fx.GraphModule(graph_module, graph_module.graph)
    known = {**plain._parameters, **plain._buffers, **plain._modules}
    return functools.partial(type(plain).forward, types.SimpleNamespace(**known))


def layer_regions(graph: fx.Graph) -> dict[fx.Node, int]:
    """A region number for every node: runs of nodes of one layer, in graph order.

    A layer is the outermost numbered child on a node's module stack. Nodes that know no module
    belong to the run they stand in.
    """
    regions: dict[fx.Node, int] = {}
    here, number = "", 0
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        layer = _layer(node)
        if layer is not None and layer != here:
            here, number = layer, number + 1
        regions[node] = number
    return regions


def _layer(node: fx.Node) -> str | None:
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return None
    for name, _ in stack.values():
        path = without_root(name)
        if found := _LAYER.search(path):
            return str(path[: found.end()])
    return ""


def _can_split(graph_module: fx.GraphModule) -> bool:
    """Whether regions can be compiled apart: no nested graphs, no float as a symbol."""
    graph = graph_module.graph
    values = (node.meta.get("example_value") for node in graph.find_nodes(op="placeholder"))
    floats = any(isinstance(value, torch.SymFloat) for value in values)
    items = any(node.op == "call_method" and node.target == "item" for node in graph.nodes)
    nested = any(
        not isinstance(getattr(graph_module, str(node.target), None), torch.Tensor)
        for node in graph.find_nodes(op="get_attr")
    )
    return not floats and not items and not nested


def _fake_mode(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> FakeTensorMode | None:
    values = [node.meta.get("example_value") for node in graph_module.graph.nodes]
    return detect_fake_mode([v for v in values if isinstance(v, torch.Tensor)] + list(inputs))


def _compiled_whole(
    graph_module: fx.GraphModule, inputs: Sequence[Any], compiler: Compiler, mode: FakeTensorMode
) -> Callable[..., Any]:
    graph_module, constants = _lift_constants(graph_module, mode)
    fakes = [mode.from_tensor(constant, static_shapes=True) for constant in constants]
    forward = compiler(graph_module, [*inputs, *fakes])
    return lambda *given: forward(*given, *constants)


def _lift_constants(
    original: fx.GraphModule, mode: FakeTensorMode
) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """A copy in which every constant is a further input; the constants in the inputs' order.

    A copy, because dynamo calls the result with the inputs of the original's placeholders.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(original.graph, {}))
    lifted: dict[str, fx.Node] = {}
    constants: list[torch.Tensor] = []
    inputs = graph.find_nodes(op="placeholder")
    last = inputs[-1] if inputs else None
    for node in graph.find_nodes(op="get_attr"):
        name = str(node.target)
        if not isinstance(getattr(original, name, None), torch.Tensor):
            continue  # a graph of its own, for instance: nothing that a layer could differ in
        if name not in lifted:
            constants.append(getattr(original, name))
            with graph.inserting_after(last):  # after None: at the very beginning
                last = lifted[name] = graph.placeholder(name)
            last.meta["example_value"] = mode.from_tensor(constants[-1], static_shapes=True)
        node.replace_all_uses_with(lifted[name])
        graph.erase_node(node)
    # Only now: making a module writes and compiles the code of its graph, thousands of lines.
    return fx.GraphModule(original, graph), constants


def _compiled(
    part: fx.GraphModule,
    compiler: Compiler,
    shared: dict[str, Callable[..., Any]],
    mode: FakeTensorMode,
) -> Callable[..., Any]:
    exact, renamed = fingerprint(part.graph, mode.shape_env)
    for key in (exact, renamed):
        if key in shared:
            return shared[key]
    guards = _guard_count(mode)
    values = [_faked(node, mode) for node in part.graph.find_nodes(op="placeholder")]
    # A context of its own: the outer one belongs to the whole graph.
    with tracing(TracingContext(mode)):
        shared[exact] = compiler(part, values)
    if _guard_count(mode) == guards:
        shared[renamed] = shared[exact]
    for node in part.graph.nodes:
        node.meta.clear()  # the compiled code keeps its graph, and that keeps the trace
    return shared[exact]


def _faked(node: fx.Node, mode: FakeTensorMode) -> Any:
    """What a placeholder was traced with; a constant has its own value there."""
    value = node.meta["example_value"]
    if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
        return mode.from_tensor(value, static_shapes=True)
    if isinstance(value, torch.SymInt) and mode.shape_env is not None:
        # A symbol that was found equal to another: in a region alone, nothing would define it.
        return mode.shape_env.create_symintnode(value.node.expr, hint=value.node.hint)
    return value


def _guard_count(mode: FakeTensorMode) -> int:
    return len(mode.shape_env.guards) if mode.shape_env is not None else 0


def fingerprint(graph: fx.Graph, shape_env: Any = None) -> tuple[str, str]:
    """What a graph computes, as text: with its own shape symbols, and with renamed ones."""
    number = {node: _Number(position) for position, node in enumerate(graph.nodes)}
    position: Any = number.__getitem__  # prints in the place of a node's name
    lines = []
    for node in graph.nodes:
        target = f"input {_describe(node)}" if node.op == "placeholder" else _target(node)
        lines.append(f"{node.op} {target} {fx.map_arg((node.args, node.kwargs), position)}")
    exact = "\n".join(lines)
    symbols = sorted({name for node in graph.nodes for name in _symbols(node)}, key=len)
    if not symbols:
        return exact, exact
    # Only true symbols: a pattern that also met "float16" would make casts look alike.
    pattern = re.compile(rf"\b({'|'.join(map(re.escape, reversed(symbols)))})\b")
    names: dict[str, str] = {}
    renamed = pattern.sub(lambda m: names.setdefault(m[0], f"symbol{len(names)}_"), exact)
    return exact, renamed + "\n" + "\n".join(_range(name, shape_env) for name in names)


def _symbols(node: fx.Node) -> set[str]:
    value = node.meta.get("example_value")
    if node.op != "placeholder" or value is None:
        return set()
    return {str(symbol) for symbol in free_symbols(value)}


class _Number:
    """Prints as a node's position; nodes themselves print as names."""

    def __init__(self, position: int) -> None:
        self.position = position

    def __repr__(self) -> str:
        return f"%{self.position}"


def _target(node: fx.Node) -> str:
    if isinstance(node.target, str):
        return node.target
    module = getattr(node.target, "__module__", "")
    return f"{module}.{node.target!s}"


def _describe(node: fx.Node) -> str:
    value = node.meta.get("example_value")
    if not isinstance(value, torch.Tensor):
        return f"{type(value).__name__} {value}"
    strides = value.stride() if value.layout == torch.strided else ()
    return (
        f"{value.dtype} {tuple(value.shape)} {tuple(strides)} {value.storage_offset()}"
        f" {value.device} {value.requires_grad}"
    )


def _range(name: str, shape_env: Any) -> str:
    if shape_env is None:
        return ""
    for symbol, bounds in shape_env.var_to_range.items():
        if str(symbol) == name:
            return str(bounds)
    return "unbounded"
