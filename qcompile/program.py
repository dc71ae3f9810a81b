"""A model as a graph whose weights have names.

Comes in: a captured graph. Goes out: the same graph, rewritten pass by pass.
Always holds: between passes the graph is valid (``check``); every weight node appears in
``weights`` under one canonical parameter name; a tied weight has one name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import fx

from qcompile.errors import LowerError
from qcompile.layout import QuantizedTensor, layout_of
from qcompile.listing import listing
from qcompile.ops import decode_meaning, embedding, linear
from qcompile.ops_experts import experts
from qcompile.site import SiteKey
from qcompile.weight import WeightRef

# What dynamo calls the traced module.
_ROOT = re.compile(r"^L\['args'\]\[\d+\]|^L\['\w+'\]")
CANONICAL = {linear: "linear", embedding: "embedding", experts: "experts"}


@dataclass
class Program:
    """An FX graph and what its nodes stand for.

    Attributes:
        graph_module: the graph; passes rewrite it in place.
        weights: canonical parameter name of every node that stands for a weight of the model.
        handles: weights of the canonical ops, by the name their handle nodes carry.
        packed: weights that ``lower`` has put into the graph, by buffer name.
    """

    graph_module: fx.GraphModule
    weights: dict[fx.Node, str] = field(default_factory=dict)
    handles: dict[str, WeightRef] = field(default_factory=dict)
    packed: dict[str, torch.Tensor] = field(default_factory=dict)
    _attributes: dict[str, str] = field(default_factory=dict)

    @property
    def graph(self) -> fx.Graph:
        """The graph itself."""
        return self.graph_module.graph

    def nodes(self, targets: Iterable[object]) -> list[fx.Node]:
        """The ``call_function`` nodes with one of these targets, in graph order."""
        wanted = set(targets)
        return [
            node
            for node in self.graph.nodes
            if node.op == "call_function" and node.target in wanted
        ]

    def canonical_nodes(self) -> list[fx.Node]:
        """The canonical ops, in graph order."""
        return self.nodes(CANONICAL)

    def add_handle(self, weight: WeightRef) -> list[fx.Node]:
        """Nodes that stand for the stored parts of a weight, made at the insertion point.

        The parts are described on the meta device: no byte of the weight is read.
        """
        self.handles[weight.name] = weight
        parts = stored_parts(weight)
        return [self.constant(f"handle_{weight.name}_{name}", part) for name, part in parts.items()]

    def constant(self, name: str, tensor: torch.Tensor) -> fx.Node:
        """A ``get_attr`` node for a buffer of this name, made at the insertion point."""
        attribute = self._attribute(name)
        self.graph_module.register_buffer(attribute, tensor, persistent=False)
        node = self.graph.get_attr(attribute)
        node.meta["example_value"] = tensor
        return node

    def _attribute(self, name: str) -> str:
        """The buffer of this name: always the same one, and no other name's."""
        if name not in self._attributes:
            attribute = "qc_" + "".join(c if c.isalnum() else "_" for c in name)
            # Names may differ in punctuation alone: p.q and p_q.
            while attribute in self._attributes.values() or hasattr(self.graph_module, attribute):
                attribute += "_"
            self._attributes[name] = attribute
        return self._attributes[name]

    def check(self, after: str) -> None:
        """Raise unless the graph is valid and every canonical op has a known weight."""
        self.graph.lint()
        for node in self.canonical_nodes():
            name = weight_name(node)
            if name not in self.handles:
                raise LowerError(
                    f"pass {after}",
                    f"node {node.name} uses the unknown weight {name!r}",
                    "a handle made by the quantize stage",
                    "report this: the pass lost a weight",
                )

    def replace(self, node: fx.Node, new: fx.Node) -> None:
        """Let ``new`` take the place of ``node`` and drop ``node``."""
        carry_meta(node, new)
        node.replace_all_uses_with(new)
        self.graph.erase_node(node)

    def __str__(self) -> str:
        """The graph as readable text; weights carry their names."""
        return listing(self)


def stored_parts(weight: WeightRef) -> dict[str, torch.Tensor]:
    """The parts of a stored weight on the meta device."""
    return layout_of(weight.layout).empty(weight.spec, weight.shape, device="meta")


def carry_meta(old: fx.Node, new: fx.Node) -> None:
    """Keep what capture knew of a node (value, module stack) on the node that replaces it."""
    for key in ("example_value", "val", "nn_module_stack", "stack_trace", "qc_site", "qc_weight"):
        if key in old.meta and key not in new.meta:
            new.meta[key] = old.meta[key]


def has_bias(node: fx.Node) -> bool:
    """Whether a canonical op adds a bias."""
    kind = CANONICAL[node.target]  # type: ignore[index]
    places = {"linear": (3,), "experts": (5, 6)}.get(kind, ())
    return any(len(node.args) > place and node.args[place] is not None for place in places)


def node_key(node: fx.Node) -> SiteKey:
    """The key of a canonical op's site; see ``qcompile.site.key_of``."""
    return CANONICAL[node.target], weight_name(node), has_bias(node)  # type: ignore[index]


def weight_name(node: fx.Node) -> str:
    """Canonical parameter name of a canonical op's weight."""
    return str(node.meta.get("qc_weight", ""))


def without_root(path: str) -> str:
    """A path of a module stack without dynamo's name for the traced module.

    >>> without_root("L['args'][0].model.layers[3]")
    '.model.layers[3]'
    """
    return _ROOT.sub("", path)


def site_name(node: fx.Node, fallback: str) -> str:
    """Path of the innermost module that a node was traced in, or ``fallback``.

    Dynamo and export record the stack as ``{key: (path, class)}``; dynamo's paths look like
    ``L['self'].model.layers[0].mlp``, or ``L['args'][0].model...`` below a decorator.
    """
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return fallback
    path = without_root(str(next(reversed(stack.values()))[0]))
    for old, new in (("._modules", ""), ("['", "."), ("']", "")):
        path = path.replace(old, new)
    path = path.replace("[", ".").replace("]", "").strip(".")
    return path or fallback


def meaning_of(node: fx.Node) -> QuantizedTensor:
    """Spec, layout and shape that a canonical op carries, without parts."""
    spec, layout, shape = decode_meaning(str(node.args[2]))
    return QuantizedTensor(spec, layout, shape, {})
