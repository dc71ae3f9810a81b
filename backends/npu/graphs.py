"""The vendor's graph compilers as emitters: ``torchair``, ``npugraph_ex`` and ``npugraphs``.

Comes in: a lowered graph and its inputs. Goes out: a callable that replays a captured graph.
Always holds: packed weights are parameters of the graph, because these compilers copy whatever else
a graph holds at every replay; packing happened before and is no part of the graph.

All three are in the torch_npu package; they need a device. The default emitter is ``eager``.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from qcompile.errors import LowerError


def _with_parameters(graph_module: fx.GraphModule) -> fx.GraphModule:
    """A copy whose constants are parameters.

    It is a plain module: dynamo's own knows where each of its parameters came from, and refuses
    those that lowering added.
    """
    plain = fx.GraphModule(graph_module, graph_module.graph)
    for name, buffer in list(plain._buffers.items()):
        if buffer is not None:
            del plain._buffers[name]
            plain.register_parameter(name, nn.Parameter(buffer, requires_grad=False))
    return plain


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:
        raise LowerError(
            f"emitter of {name}",
            f"it cannot be imported: {error}",
            "torch_npu and its device",
            'pass emitter="eager", or emulate=True where there is no device',
        ) from None


def _torchair(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    torchair = _package("torchair")
    config = torchair.CompilerConfig()
    config.mode = "reduce-overhead"
    compiler = torchair.get_npu_backend(compiler_config=config)
    return compiler(_with_parameters(graph_module), list(inputs))  # type: ignore[no-any-return]


def _npugraph_ex(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    package = _package("npugraph_ex")
    config = package.CompilerConfig()
    # torch_npu 2.13 and 2.14 read this attribute for the operators that we emit, and never set it.
    object.__setattr__(config, "experimental_config", types.SimpleNamespace())
    compiler = package.get_npu_backend(compiler_config=config)
    return compiler(_with_parameters(graph_module), list(inputs))  # type: ignore[no-any-return]


def _npugraphs(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    _package("torch_npu")
    compiler: Any = torch._dynamo.lookup_backend("npugraphs")
    graph = _with_parameters(graph_module)
    captured: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def run(*given: Any) -> Any:
        # It captures one shape and replays that whatever it is given, so each shape has its own.
        shapes = tuple(x.shape if isinstance(x, torch.Tensor) else x for x in given)
        tensors = [x for x in given if isinstance(x, torch.Tensor)]
        if shapes not in captured:
            captured[shapes] = compiler(_Fixed(graph, given).transform(), tensors)
        return captured[shapes](*tensors)

    return run


class _Fixed(fx.Transformer):
    """A graph whose numbers among the inputs are constants: it takes tensors alone."""

    def __init__(self, graph_module: fx.GraphModule, given: Sequence[Any]) -> None:
        super().__init__(graph_module)
        self.given = iter(given)

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        """An input, or the number that it is."""
        value = next(self.given)
        if isinstance(value, torch.Tensor):
            return super().placeholder(target, args, kwargs)
        return value


EMITTERS = {"torchair": _torchair, "npugraph_ex": _npugraph_ex, "npugraphs": _npugraphs}
