"""The JIT front end: everything that leans on dynamo's own contracts.

Comes in: a graph from dynamo. Goes out: what dynamo calls instead.
Always holds: a graph whose weights are constants is guarded by the identity of every parameter it
replaced. Without those guards dynamo would reuse it for another module and answer wrongly.

The private contracts used here (``install_guard``, the frame's locals, placeholders erased in
place) are covered by ``tests/test_dynamo.py``, which fails when a torch release changes them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx, nn
from torch._dynamo.guards import GuardBuilder, install_guard

from qcompile.errors import CaptureError, OptionError, nearest
from qcompile.session import Session

OPTIONS = ("scheme", "checkpoint", "device", "on_unsupported", "emitter", "keep")


def guard_identity(node: fx.Node) -> None:
    """Make dynamo recompile when the parameter behind a placeholder is another object."""
    argument = node.meta.get("grapharg")
    if argument is not None:
        install_guard(argument.source.make_guard(GuardBuilder.ID_MATCH))


def backend(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], **given: Any
) -> Callable[..., Any]:
    """The ``torch.compile`` backend ``"qcompile"``.

    Options are those of ``qcompile.optimize``: ``scheme``, ``checkpoint``, ``device``,
    ``on_unsupported``, ``emitter``, ``keep``.
    """
    from qcompile.pipeline import compile_graph

    options = dict(given.get("options") or {})
    for name in options:
        if name not in OPTIONS:
            raise OptionError(
                'torch.compile(backend="qcompile")',
                f"unknown option {name!r}",
                f"some of {', '.join(OPTIONS)}",
                f"correct the options{nearest(name, OPTIONS)}",
            )
    return compile_graph(graph_module, example_inputs, _session(_root_module(), options))


_SESSIONS: weakref.WeakKeyDictionary[nn.Module, dict[str, Session]] = weakref.WeakKeyDictionary()


def _session(model: nn.Module, options: dict[str, Any]) -> Session:
    """One session for a module and a set of options, so that recompiles share packed weights."""
    from qcompile.api import session_for

    sessions = _SESSIONS.setdefault(model, {})
    key = repr(sorted(options.items()))
    if key not in sessions:
        sessions[key] = session_for(model, bind_floats=True, **options)
    return sessions[key]


def _root_module() -> nn.Module:
    """The module whose ``forward`` dynamo is tracing."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    local = InstructionTranslator.current_tx().output.root_tx.f_locals
    # Calls that torch wraps (containers, bound methods) carry the callable as ``fn``.
    model = local.get("self", local.get("fn"))
    model = model if isinstance(model, nn.Module) else getattr(model, "__self__", None)
    if not isinstance(model, nn.Module):
        raise CaptureError(
            'torch.compile(backend="qcompile")',
            "the compiled function is not a module's forward",
            "a module, since weights are found by their names in it",
            "compile the module itself, or use qcompile.optimize(module, ...)",
        )
    return model
