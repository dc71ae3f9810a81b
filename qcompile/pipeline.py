"""The compiler, top to bottom.

Comes in: a captured graph and the session it belongs to. Goes out: a callable.
Always holds: the stages run in this order and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from qcompile.backends import HasPasses
from qcompile.capture import capture_dynamo
from qcompile.emit import emitter_of
from qcompile.leftovers import bind_leftovers
from qcompile.memory import release_freed, return_pages
from qcompile.observe import dump, log, run_pass
from qcompile.passes import CANONICALIZE, installed
from qcompile.passes.lower import Lower
from qcompile.passes.quantize.swap import SwapQuantized
from qcompile.program import Program
from qcompile.session import Session, sites_of
from qcompile.site import key_of


def compile_graph(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], session: Session
) -> Callable[..., Any]:
    """Compile a graph that dynamo traced; its placeholders for weights are erased in place."""
    program, inputs = lower_graph(graph_module, example_inputs, session)
    # The rest is the device compiler's work.
    return emit(program, inputs, session)


def lower_graph(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], session: Session
) -> tuple[Program, dict[fx.Node, Any]]:
    """All stages before the last: the program, and what its placeholders were traced with."""
    inputs = dict(zip(graph_module.graph.find_nodes(op="placeholder"), example_inputs, strict=True))
    # Name every weight by the identity of the tensor the model holds.
    program = capture_dynamo(graph_module, example_inputs, session.names)
    # One node form for each kind of use, so that the next passes know only that form.
    for rewrite in (*CANONICALIZE, *installed()):
        run_pass(rewrite, program)
    # Uses of quantized weights become ops on handles: no byte moves yet.
    run_pass(SwapQuantized(session.catalogue), program)
    # Every site has its kernel before a weight is touched.
    session.extend_plan(program)
    log("plan", str(session.plan))
    dump("plan.txt", session.plan)
    # Repack what this graph needs and no earlier graph has packed.
    transform_weights(program, session)
    # Canonical ops become kernel calls; what is left of the weights must be bound too.
    run_pass(Lower(session.entries(), session.packed), program)
    bind_leftovers(program, session)
    # What a backend makes of calls that only it knows.
    if isinstance(session.backend, HasPasses):
        for last in session.backend.passes(session.plan.numerics):
            run_pass(last, program)
    return program, inputs


def transform_weights(program: Program, session: Session) -> None:
    """Send the weights of the program's sites through their plan's edges."""
    release_freed()
    session.backend.prepare()
    entries = session.entries()
    session.pack_all(entries[key_of(site)] for site in sites_of(program))
    return_pages()


def emit(program: Program, inputs: dict[fx.Node, Any], session: Session) -> Callable[..., Any]:
    """Hand the lowered graph to the plan's emitter with the inputs that are left."""
    graph_module = program.graph_module
    session.compiles += 1
    left = [inputs[node] for node in graph_module.graph.find_nodes(op="placeholder")]
    emitted = session.runnable(emitter_of(session.plan.emitter)(graph_module, left))
    for node in graph_module.graph.nodes:
        if node.op != "placeholder":  # dynamo still reads those
            node.meta.clear()  # only compiling needs it, and it holds the trace's memory
    release_freed()
    return emitted
