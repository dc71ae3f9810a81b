"""The JIT front end: everything that leans on dynamo's own contracts.

Comes in: a graph from dynamo. Goes out: what dynamo calls instead.
Always holds: a graph whose weights are constants is guarded by the identity of every parameter it
replaced. Without those guards dynamo would reuse it for another module and answer wrongly.

The private contracts used here (``install_guard``, the frame's locals, placeholders erased in
place) are covered by ``tests/test_dynamo.py``, which fails when a torch release changes them.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo import config, exc
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.types import GuardFilterEntry

from qcompile.errors import CaptureError, OptionError, nearest
from qcompile.memory import forget_traces
from qcompile.session import Session

_GRAPHS = 64  # of one model
OPTIONS = ("scheme", "checkpoint", "device", "on_unsupported", "emitter", "keep", "numerics")


def compile_forward(
    forward: Callable[..., Any], session: Session, fullgraph: bool
) -> tuple[Callable[..., Any], Callable[[], Any]]:
    """A module's ``forward`` compiled for a session, and the settings to call it under."""

    def compiler(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        from qcompile.pipeline import compile_graph

        _skip_guard_timing()
        return compile_graph(graph_module, inputs, session)

    own, first = _own_code(forward)
    compiled = torch.compile(
        own,
        backend=compiler,
        dynamic=True,
        fullgraph=fullgraph,
        options={"guard_filter_fn": _needed},
    )

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        before = session.compiles
        result = compiled(*first, *args, **kwargs)
        if session.compiles != before:
            forget_traces()
        return result

    # Prompts and decoding, batches and dtypes are graphs of their own: more than torch allows.
    # Floats such as the attention's scale never change; as symbols they would split every layer's
    # graph.
    return run, _settings


def trace(
    function: Callable[..., Any],
    given: Sequence[Any],
    compiler: Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]],
) -> Any:
    """Trace one call of a module's method, and run what a compiler makes of the graph.

    Sizes are numbers in the graph, but for those that ``mark_dynamic`` made symbols.
    """
    own, first = _own_code(function)
    with _settings():
        # Not left to dynamo, which makes symbols of sizes that an earlier trace had otherwise.
        traced = torch.compile(own, backend=compiler, fullgraph=True, dynamic=False)
        return traced(*first, *given)


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    """How dynamo is to trace."""
    # torch's own encoder layers have a path that takes all their weights at once, and that a trace
    # cannot look into.
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with config.patch(recompile_limit=_GRAPHS, specialize_float=True):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _own_code(forward: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The same call with a code object of its own, and its first arguments.

    Dynamo keeps its graphs with the code object that it traced. All instances of a class share
    theirs, and all models of transformers share that of a decorator: graphs of models that are
    gone would stay, and count towards the limit.
    """
    function, owner = getattr(forward, "__func__", None), getattr(forward, "__self__", None)
    if function is None or owner is None:

        def call(*args: Any, **kwargs: Any) -> Any:
            return forward(*args, **kwargs)

        call.__code__ = call.__code__.replace()
        return call, ()

    def call_method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    call_method.__code__ = call_method.__code__.replace()  # always a new object
    return call_method, (owner,)


def _needed(guards: Sequence[GuardFilterEntry]) -> list[bool]:
    """Which guards to keep: of parameters known by identity, only that one.

    The other asks each of them, at every call, for marks of dynamic sizes.
    """
    known = {guard.name for guard in guards if guard.guard_type == "ID_MATCH"}
    return [guard.guard_type != "TENSOR_MATCH" or guard.name not in known for guard in guards]


def _skip_guard_timing() -> None:
    """Keep dynamo from timing the new guards: it fills 32 MB first, to flush the caches."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    InstructionTranslator.current_tx().output.skip_guards_check = True


def as_capture_error(failure: Exception, model: str) -> CaptureError | None:
    """What dynamo could not trace, told as our errors are; None for a failure of another kind."""
    if isinstance(failure, exc.FailOnRecompileLimitHit):
        return CaptureError(
            model,
            f"more than {_GRAPHS} graphs of one model: {str(failure).splitlines()[0]}",
            "calls that differ in few ways but the numbers of rows",
            "pass tensors of one dtype and rank; TORCH_LOGS=recompiles tells what differs",
        )
    if not isinstance(failure, (exc.Unsupported, exc.UserError)):
        return None
    stack = getattr(failure, "real_stack", None)
    place = f"{stack[-1].filename}:{stack[-1].lineno} in {stack[-1].name}" if stack else model
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    return CaptureError(
        place,
        lines[0],
        f"a forward of {model} that can be traced as one graph",
        "rewrite that line, or call optimize(..., fullgraph=False) to run it between graphs",
        reasons=[line for line in lines[1:] if line.startswith(("Explanation:", "Hint:"))],
    )


def guard_identity(node: fx.Node) -> None:
    """Make dynamo recompile when the parameter behind a placeholder is another object."""
    argument = node.meta.get("grapharg")
    if argument is not None:
        install_guard(argument.source.make_guard(GuardBuilder.ID_MATCH))


def backend(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], **given: Any
) -> Callable[..., Any]:
    """The ``torch.compile`` backend ``"qcompile"``.

    Args:
        graph_module: what dynamo traced.
        example_inputs: its inputs; dynamo passes the module's own parameters among them.
        given: ``options``, those of ``qcompile.optimize``: ``scheme``, ``checkpoint``, ``device``,
            ``on_unsupported``, ``emitter``, ``keep``, ``numerics``.

    Returns:
        what dynamo calls instead of the graph.

    Raises:
        OptionError, SchemeError, PlanError, CaptureError: as ``optimize``.
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
    from qcompile.prepare import session_for

    sessions = _SESSIONS.setdefault(model, {})
    key = repr(sorted(options.items()))
    if key not in sessions:
        sessions[key] = session_for(model, bind_floats=True, **options)
    return sessions[key]


def _root_module() -> nn.Module:
    """The module whose ``forward`` dynamo is tracing."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    root = InstructionTranslator.current_tx().output.root_tx
    local, code = root.f_locals, root.f_code
    first = code.co_varnames[0] if code.co_argcount else "self"
    # Calls that torch wraps (containers, bound methods) carry the callable as ``fn``.
    model = local.get(first)
    model = model if isinstance(model, nn.Module) else local.get("fn", model)
    model = model if isinstance(model, nn.Module) else getattr(model, "__self__", None)
    if not isinstance(model, nn.Module):
        raise CaptureError(
            'torch.compile(backend="qcompile")',
            "the compiled function is not a module's forward",
            "a module, since weights are found by their names in it",
            "compile the module itself, or use qcompile.optimize(module, ...)",
        )
    return model
