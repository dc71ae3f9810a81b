"""A kernel's own calls, as ``lower`` would put them into a graph, run under emulation."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from qcompile import ops
from qcompile.backends.npu.emulation import Mode, emulating
from qcompile.kernel import Kernel
from qcompile.layout import QuantizedTensor


def emulated_call(
    kernel: Kernel, packed: QuantizedTensor, rest: Any, x: torch.Tensor | None = None
) -> fx.GraphModule:
    """A graph of one input with the kernel's calls.

    Args:
        kernel: a linear or an embedding kernel.
        packed: a weight in its layout.
        rest: the bias of a linear, or None; the dtype of an embedding.
        x: an input whose shape the graph shall know, or None.
    """
    owner, graph = torch.nn.Module(), fx.Graph()
    first = graph.placeholder("x")
    if x is not None:
        first.meta["example_value"] = x
    parts = []
    for name, part in packed.parts.items():
        owner.register_buffer(name, part)
        parts.append(graph.get_attr(name))
    if isinstance(rest, torch.Tensor):
        owner.register_buffer("bias", rest)
        rest = graph.get_attr("bias")
    target = ops.linear if kernel.kind == "linear" else ops.embedding
    canonical = graph.call_function(target, (first, parts, ops.encode_meaning(packed), rest))
    with graph.inserting_before(canonical):
        graph.output(kernel.emit(graph, canonical, parts, packed))
    return fx.GraphModule(owner, graph)


def emulate(
    kernel: Kernel,
    packed: QuantizedTensor,
    x: torch.Tensor,
    rest: Any,
    wide: bool = False,
    arch: str = "910b",
) -> torch.Tensor:
    """Run the kernel's calls on one input: once with its shape known, once without."""
    known = emulated_call(kernel, packed, rest, x)
    unknown = emulated_call(kernel, packed, rest)
    with emulating(Mode(arch, wide)):
        found: torch.Tensor = known(x)
        if x.numel():
            assert torch.equal(found, unknown(x))
    return found


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The relative L2 error that ``Tolerance`` bounds."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())
