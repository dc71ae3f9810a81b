"""Weights that a graph still uses after lowering.

Comes in: a lowered program. Goes out: a program in which every weight is bound.
Always holds: no stand-in, and no value of the user's module that the checkpoint overrides, reaches
the emitted code.
"""

from __future__ import annotations

import torch
from torch import fx

from qcompile.errors import CaptureError, LowerError
from qcompile.plan_text import mib
from qcompile.program import Program
from qcompile.session import Session
from qcompile.spec import is_quantized
from qcompile.weight import WeightRef


def bind_leftovers(program: Program, session: Session) -> None:
    """Bind the weights that are still used, drop the placeholders of those that are not.

    Raises:
        CaptureError: a quantized weight has a use that is no site, and the policy is ``error``.
        LowerError: a canonical op still stands on a handle.
    """
    _refuse_handles(program)
    for node, name in list(program.weights.items()):
        weight = session.catalogue.get(name)
        if weight is None or (node.users and not _must_bind(weight, session)):
            continue
        if node.users:
            _materialize(program, node, weight, session)
        _drop(program, node)


def _refuse_handles(program: Program) -> None:
    """A handle has no bytes: an op that kept one would answer with garbage, silently."""
    for node in program.graph.find_nodes(op="get_attr"):
        value = getattr(program.graph_module, str(node.target), None)
        if isinstance(value, torch.Tensor) and value.is_meta and node.users:
            user = next(iter(node.users))
            raise LowerError(
                f"node {user.name} ({user.meta.get('qc_site', 'unnamed site')})",
                f"{user.target} was not lowered",
                "a kernel's call in the place of every canonical op",
                "run the pass lower (QCOMPILE_SKIP left it out), or report this",
            )


def _must_bind(weight: WeightRef, session: Session) -> bool:
    return is_quantized(weight.spec) or session.bind_floats


def _materialize(program: Program, node: fx.Node, weight: WeightRef, session: Session) -> None:
    if is_quantized(weight.spec) and session.policy == "error":
        raise _unknown_use(node, weight, session.dtype)
    traced = node.meta["example_value"]
    value = session.float_weight(weight, traced.dtype)
    with program.graph.inserting_before(node):
        constant = program.constant(f"{weight.name}_float", value)
    program.packed[str(constant.target)] = value
    node.replace_all_uses_with(constant)


def _drop(program: Program, node: fx.Node) -> None:
    from qcompile.dynamo import guard_identity

    guard_identity(node)
    del program.weights[node]
    program.graph.erase_node(node)


def _unknown_use(node: fx.Node, weight: WeightRef, dtype: torch.dtype) -> CaptureError:
    uses = ", ".join(f"{user.name} = {user.target}" for user in list(node.users)[:3])
    size = dtype.itemsize
    for extent in weight.shape:
        size *= extent
    return CaptureError(
        weight.name,
        f"the quantized weight is used by {uses}",
        "uses as a linear or an embedding only",
        f'on_unsupported="dequantize" (adds {mib(size)} of floats), or rewrite that use',
    )
