"""The emitter ``chain``: all layers of one token are one call from Python.

Comes in: a lowered graph. Goes out: a callable.
Always holds: what Inductor compiles is what runs; a graph that cannot be chained runs as under
the emitter ``inductor``, with the same results.

A token's products on a small model take less time than the Python between them. Where rows are
few, Inductor writes each region of ``qcompile.outline`` in C++, and ``csrc/chain.cpp`` calls one
after the other. Compiling those takes longer, so prompts, whose products take much longer than
Python, stay with Inductor's own wrapper.
"""

from __future__ import annotations

import ctypes
import operator
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from qcompile.backends.cpu.gated import has_few_rows
from qcompile.backends.cpu.panel import library
from qcompile.backends.cpu.shims import declarations, export_symbols
from qcompile.emit import emitter_of
from qcompile.observe import log
from qcompile.outline import outline, without_graph

_PRODUCTS = ("panel_linear", "panel_linears", "panel_gated")
# What Inductor writes: ``void inductor_entry_impl(AtenTensorHandle*, AtenTensorHandle*)``.
_ENTRY = "_Z19inductor_entry_implPP16AtenTensorOpaqueS1_"

# Numbers: see csrc/chain.cpp.
library.define("chain_make(Tensor[] constants, int[] numbers) -> int")
library.define("chain_run(Tensor[] given, int chain) -> Tensor[]")
library.define("chain_drop(int chain) -> ()")


@dataclass(frozen=True)
class Compiled:
    """Compiled code of a region.

    Attributes:
        call: the code for Python.
        kinds: what its results are, ``torch.Tensor`` or ``int``.
        address: of the C++ code, where that does all that ``call`` does; None otherwise.
    """

    call: Callable[..., Any]
    kinds: tuple[type, ...]
    address: int | None

    def __call__(self, *given: Any) -> Any:
        """Run the region from Python."""
        return self.call(*given)


def emit(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """A chain where rows are few; what the emitter ``inductor`` makes of it otherwise."""
    if not _has_few_rows(graph_module.graph):
        return emitter_of("inductor")(graph_module, inputs)
    export_symbols()
    return outline(graph_module, inputs, _compile, _link)


def _has_few_rows(graph: fx.Graph) -> bool:
    """Whether every product is known to have few rows, and there is one."""
    ops = [getattr(torch.ops.qcompile_cpu, name).default for name in _PRODUCTS]
    nodes = [node for op in ops for node in graph.find_nodes(op="call_function", target=op)]
    return bool(nodes) and all(has_few_rows(node.args[0]) for node in nodes)


# **** one region ****


def _compile(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
    from torch._functorch import config as functorch_config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    from qcompile.inductor_stamp import settings

    results: Any = graph_module.graph.output_node().args[0]
    several = results if isinstance(results, (tuple, list)) else (results,)
    codes: list[Any] = []

    def compile_inner(graph: fx.GraphModule, given: Sequence[Any], **options: Any) -> Any:
        code = compile_fx_inner(graph, given, **options)
        whole = len(given) == len(inputs) and options.get("is_inference")
        codes.append(code if whole else None)
        return code

    shims = {"cpp_wrapper": True, "aot_inductor.custom_ops_to_c_shims": declarations()}
    # A hit in AOTAutograd's cache would not say which code it runs; Inductor's own cache does.
    with functorch_config.patch(enable_autograd_cache=False):
        call: Any = compile_fx(
            graph_module,
            list(inputs),
            inner_compile=compile_inner,
            config_patches={**settings(), **shims},
        )
    plain = len(codes) == 1 and all(isinstance(result, fx.Node) for result in several)
    plain = plain and _passes_through(len(several)) and _is_complete(codes[0], len(several))
    address = _address(codes[0]) if plain else None
    return Compiled(call, tuple(map(_kind, several)), address)


def _kind(result: Any) -> type:
    value = result.meta.get("example_value") if isinstance(result, fx.Node) else result
    return int if isinstance(value, (int, torch.SymInt)) else torch.Tensor


def _passes_through(results: int) -> bool:
    """Whether the code around Inductor's hands on inputs and outputs as they are.

    False also where a release of torch does not tell: nothing is lost but time.
    """
    from torch._functorch._aot_autograd import schemas
    from torch._guards import TracingContext

    context: Any = TracingContext.try_get()
    try:
        known = context.fw_metadata
        plain = (schemas.OutputType.non_alias, schemas.OutputType.unsafe_view_alias)
        types = [output.output_type for output in known.output_info]
        around = known.tokens or known.num_mutated_inp_runtime_indices
        around = around or known.grad_enabled_mutation is not None
    except AttributeError:
        return False
    return not around and len(types) == results and all(kind in plain for kind in types)


def _is_complete(code: Any, results: int) -> bool:
    """Whether C++ code takes a graph's inputs and nothing else, and gives its results only.

    Tensors that a graph makes of literals are further inputs, which Inductor's Python hands on.
    """
    held = ("constants", "frozen_param_names", "torchbind_constants")
    if any(getattr(code, name, True) for name in held):
        return False
    return len(getattr(code, "output_strides", None) or ()) == results


def _address(code: Any) -> int | None:
    """Where the C++ code of a compiled graph begins; None where it has none of this form."""
    call = getattr(code, "current_callable", None)
    for cell in getattr(call, "__closure__", None) or ():
        module = getattr(cell.cell_contents, "__self__", None)
        if isinstance(module, types.ModuleType) and module.__file__:
            found = getattr(ctypes.CDLL(module.__file__), _ENTRY, None)
            return ctypes.cast(found, ctypes.c_void_p).value if found is not None else None
    return None


# **** all regions ****


def _link(whole: fx.GraphModule) -> Callable[..., Any]:
    """One call for all regions where each has an address; else Python, region by region."""
    nodes = list(whole.graph.nodes)
    regions = [node for node in nodes if node.op == "call_module"]
    codes = {node: _code_of(whole, node) for node in regions}
    known = ("placeholder", "get_attr", "call_module", "output")
    apart = [node for node in nodes if node.op not in known and not _is_item(node)]
    apart += [node for node, code in codes.items() if code.address is None]
    apart += [node for node in regions if not all(isinstance(x, fx.Node) for x in node.args)]
    if apart:
        log("passes", f"emit: regions stay apart, {apart[0].name} is not plain C++")
        return without_graph(whole)
    return Chain(whole, codes)


def _code_of(whole: fx.GraphModule, node: fx.Node) -> Compiled:
    code = whole.get_submodule(str(node.target)).forward
    assert isinstance(code, Compiled)
    return code


def _is_item(node: fx.Node) -> bool:
    return node.target is operator.getitem and isinstance(node.args[1], int)


class Chain:
    """A callable: regions one after the other.

    Args:
        whole: a graph of regions, their results, constants and inputs.
        codes: each region's code, in the graph's order.
    """

    def __init__(self, whole: fx.GraphModule, codes: Mapping[fx.Node, Compiled]) -> None:
        results: Any = whole.graph.output_node().args[0]
        held = whole.graph.find_nodes(op="get_attr")
        constants = [getattr(whole, str(node.target)) for node in held]
        self._number = torch.ops.qcompile_cpu.chain_make(constants, _numbers(whole.graph, codes))
        self._kinds = tuple(_source(result, codes) for result in results)
        self._tensors = all(kind is torch.Tensor for kind in self._kinds)
        # Their libraries stay loaded as long as Inductor's code is known.
        self._codes = tuple(codes.values())
        weakref.finalize(self, torch.ops.qcompile_cpu.chain_drop, self._number)

    def __call__(self, *given: Any) -> tuple[Any, ...]:
        """Run all regions on what the graph takes."""
        tensors = [x if isinstance(x, torch.Tensor) else _number(x) for x in given]
        found = torch.ops.qcompile_cpu.chain_run(tensors, self._number)
        if self._tensors:
            return tuple(found)
        left = iter(found)
        return tuple(_result(kind, left) for kind in self._kinds)


def _number(value: int) -> torch.Tensor:
    return torch.tensor(value, device="cpu")  # whatever the default device is


def _numbers(graph: fx.Graph, codes: Mapping[fx.Node, Compiled]) -> list[int]:
    """A graph of regions as csrc/chain.cpp reads it."""
    given, held = graph.find_nodes(op="placeholder"), graph.find_nodes(op="get_attr")
    places: dict[Any, int] = {node: place for place, node in enumerate((*given, *held))}
    count = fixed = len(places)
    for region, code in codes.items():
        places[region] = count  # of its first result, which is the region's value if it is alone
        count += len(code.kinds)
    for node in filter(_is_item, graph.nodes):
        places[node] = places[node.args[0]] + int(node.args[1])
    outputs: Any = graph.output_node().args[0]
    results = [places[node] for node in outputs if isinstance(node, fx.Node)]
    steps: list[int] = []
    later = set(results)
    for region, code in reversed(list(codes.items())):
        reads = [places[node] for node in region.args]
        made = range(places[region], places[region] + len(code.kinds))
        ends: list[int] = []
        for place in reversed(reads):
            ends.insert(0, int(place >= fixed and place not in later))
            later.add(place)
        assert code.address is not None
        steps[:0] = [code.address, len(reads), *reads, len(made), *made, *ends]
    return [len(given), count, len(results), *results, len(codes), *steps]


def _source(result: object, codes: Mapping[fx.Node, Compiled]) -> object:
    """What a result is: a tensor, a number that a region computes, or a constant itself."""
    if not isinstance(result, fx.Node):
        return result
    if result in codes:
        return codes[result].kinds[0]
    if _is_item(result):
        return codes[result.args[0]].kinds[result.args[1]]  # type: ignore[index]
    return _kind(result)


def _result(kind: object, left: Iterator[torch.Tensor]) -> Any:
    if kind is torch.Tensor:
        return next(left)
    return next(left).item() if kind is int else kind
