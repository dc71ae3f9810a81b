"""Every spelling of an embedding of a named weight becomes ``aten.embedding(w, ids)``.

Before: ``F.embedding(ids, w, padding_idx)``, ``aten.embedding(w, ids, padding_idx)``, ``w[ids]``.
After: ``aten.embedding.default(w, ids)``. The padding index only steers gradients. A ``max_norm``
would change the weight, so such a node is left alone.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx

from qcompile.program import Program

EMBEDDING = torch.ops.aten.embedding.default
_NAMES = ("input", "weight", "padding_idx", "max_norm")


@dataclass(frozen=True)
class CanonicalizeEmbedding:
    """See the module's text."""

    name: str = "canonicalize.embedding"

    def run(self, program: Program) -> int:
        """Rewrite the program; the number of nodes that changed."""
        return sum(_rewrite(program, node) for node in list(program.graph.nodes))


def _rewrite(program: Program, node: fx.Node) -> bool:
    found = match_embedding(program, node)
    if found is None or (node.target is EMBEDDING and len(node.args) == 2):
        return False
    with program.graph.inserting_before(node):
        new = program.graph.call_function(EMBEDDING, found)
    program.replace(node, new)
    return True


def match_embedding(program: Program, node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """``(weight, ids)`` when the node looks rows of a named weight up, else None."""
    if node.op != "call_function":
        return None
    if node.target is EMBEDDING:
        return _named(program, node.args[0], node.args[1])
    if node.target in (torch.nn.functional.embedding, torch.embedding):
        given = dict(zip(_NAMES, node.args, strict=False)) | node.kwargs
        if node.target is torch.embedding:
            given["input"], given["weight"] = given["weight"], given["input"]
        if given.get("max_norm") is not None:
            return None
        return _named(program, given.get("weight"), given.get("input"))
    if node.target is torch.ops.aten.index.Tensor:
        indices = node.args[1]
        alone = isinstance(indices, (list, tuple)) and len(indices) == 1 and _is_index(indices[0])
        return _named(program, node.args[0], indices[0]) if alone else None  # type: ignore[index]
    if node.target is operator.getitem and _is_index(node.args[1]):
        return _named(program, node.args[0], node.args[1])
    return None


def _named(program: Program, weight: object, ids: object) -> tuple[fx.Node, fx.Node] | None:
    if weight not in program.weights or not isinstance(ids, fx.Node):
        return None
    assert isinstance(weight, fx.Node)
    return weight, ids


def _is_index(node: object) -> bool:
    if not isinstance(node, fx.Node):
        return False
    value = node.meta.get("example_value", node.meta.get("val"))
    return isinstance(value, torch.Tensor) and value.dtype in (torch.int32, torch.int64)
