"""A model becomes a ``Program``.

Comes in: what a front end traced. Goes out: a graph whose weight nodes have canonical names.
Always holds: a weight is named by the identity of the tensor the model holds, not by the order or
the spelling of the trace; tied weights get one name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from qcompile.program import Program

Names = Mapping[int, str]


def parameter_names(model: nn.Module, preferred: Mapping[str, object] | None = None) -> Names:
    """Canonical name of every parameter of a model, by ``id``.

    Args:
        model: the module whose ``forward`` is traced.
        preferred: names to choose among the aliases of a tied parameter; else the first one.
    """
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = names.get(id(parameter))
        if known is None or (
            preferred is not None and name in preferred and known not in preferred
        ):
            names[id(parameter)] = name
    return names


def capture_dynamo(
    graph_module: fx.GraphModule, example_inputs: Sequence[object], names: Names
) -> Program:
    """The program of a graph that dynamo traced.

    Args:
        graph_module: torch-level nodes; parameters are placeholders.
        example_inputs: one for each placeholder. Dynamo passes the very Parameter objects.
        names: canonical names by identity of the parameter.
    """
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    program = Program(graph_module)
    for node, value in zip(placeholders, example_inputs, strict=True):
        if id(value) in names:
            program.weights[node] = names[id(value)]
    return program


def capture_export(exported: ExportedProgram) -> Program:
    """The program of an exported model: ATen nodes; parameters are lifted placeholders.

    Args:
        exported: the result of ``torch.export.export``; its graph is rewritten in place.
    """
    program = Program(exported.graph_module)
    by_identity: dict[int, str] = {}
    targets = {
        spec.arg.name: spec.target
        for spec in exported.graph_signature.input_specs
        if spec.kind is InputKind.PARAMETER and spec.target is not None
    }
    for node in exported.graph_module.graph.find_nodes(op="placeholder"):
        if node.name not in targets:
            continue
        value: torch.Tensor = exported.state_dict[targets[node.name]]
        program.weights[node] = by_identity.setdefault(id(value), targets[node.name])
    return program
