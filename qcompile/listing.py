"""A program as text.

Comes in: a program. Goes out: Python-like text, one line for each node.
Always holds: values are numbered in graph order, weights carry their parameter names and a
canonical op shows what its weight means, so equal programs print alike whatever made them.

    def forward(ids):
        v0 = aten.embedding.default(w['embed.weight'], ids)  # float32 [2, 3, 8]
        v1 = qcompile.linear.default(v0, [self.handle_head_codes], 'uint4 ...', None)
        return (v1,)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import fx

from qcompile.layout import QuantizedTensor
from qcompile.ops import decode_meaning, embedding, linear

if TYPE_CHECKING:
    from qcompile.program import Program


class _Name:
    """Prints as a node's name; nodes themselves print as what fx calls them."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def listing(program: Program) -> str:
    """The text of a program."""
    names: dict[fx.Node, _Name] = {}
    inputs: list[str] = []
    lines: list[str] = []
    for node in program.graph.nodes:
        if node in program.weights:
            names[node] = _Name(f"w[{program.weights[node]!r}]")
        elif node.op == "placeholder":
            names[node] = _Name(node.name)
            inputs.append(node.name)
        elif node.op == "get_attr":
            names[node] = _Name(f"self.{str(node.target).removeprefix('qc_')}")
        elif node.op == "output":
            lines.append(f"return {fx.map_arg(node.args[0], names.__getitem__)!r}")  # type: ignore[arg-type]
        else:
            call = _call(node, names)
            names[node] = _Name(f"v{len(lines)}")
            lines.append(f"{names[node]} = {call}{_comment(node)}")
    return "\n    ".join([f"def forward({', '.join(inputs)}):", *lines]) + "\n"


def _call(node: fx.Node, names: dict[fx.Node, _Name]) -> str:
    given = list(node.args)
    if node.target in (linear, embedding):
        given[2] = _meaning(str(given[2]))
    args = [repr(fx.map_arg(arg, names.__getitem__)) for arg in given]  # type: ignore[arg-type]
    args += [
        f"{key}={fx.map_arg(arg, names.__getitem__)!r}"  # type: ignore[arg-type]
        for key, arg in node.kwargs.items()
    ]
    if node.op == "call_method":
        return f"{args[0]}.{node.target}({', '.join(args[1:])})"
    return f"{_target(node.target)}({', '.join(args)})"


def _target(target: object) -> str:
    if isinstance(target, (str, torch._ops.OpOverload)):
        return str(target)
    return str(getattr(target, "__name__", target))


def _meaning(text: str) -> str:
    weight = QuantizedTensor(*decode_meaning(text), {})
    return f"{weight.spec} {weight.layout} {list(weight.shape)}"


def _comment(node: fx.Node) -> str:
    value = node.meta.get("example_value", node.meta.get("val"))
    if not isinstance(value, torch.Tensor):
        return ""
    return f"  # {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
