"""The graphs of an artifact: one for prompts, one for single tokens.

Comes in: a model that ``qcompile.load`` compiled. Goes out: lowered graphs that take ids, positions
and caches, and hold everything else.
Always holds: the graphs share the session's packed weights; a graph for prompts takes any number of
tokens from ``ROWS[0]`` to ``ROWS[1]``; nothing but the caches is remembered from call to call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from qcompile.bind_inputs import Copies, bind_inputs
from qcompile.capture import parameter_names
from qcompile.errors import CaptureError, LowerError, OptionError
from qcompile.memory import release_freed
from qcompile.session import Session

Say = Callable[[str], None]

# A graph for fewer rows than the first would be one whose products are those of single tokens;
# more than the last gain nothing, and take memory.
ROWS = (9, 512)
PROBE = 48  # tokens of the check
_TRACED = 10  # of them, for prompts
_FIX = "use qcompile.load for this model"


def example(
    model: nn.Module, context: int
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Some ids ``[T]``, the model's logits ``[T, V]`` of them, and empty caches.

    Raises:
        OptionError: the context is longer than the model's keys hold for.
        CaptureError: it is no language model, or keeps something else than keys and values.
    """
    from qcompile.hf_step import check_context, check_forward, empty_caches, layers_of

    name = type(model).__name__
    check_forward(model)
    check_context(model, context)
    config: Any = model.config
    size = config.get_text_config().vocab_size
    ids = torch.randint(size, (PROBE,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = model(input_ids=ids[None], use_cache=True)
    caches = empty_caches(layers_of(found, name), context, name)
    if len({cache.dtype for cache in caches}) > 1:
        raise CaptureError(name, "caches of several dtypes", "one dtype", _FIX)
    return ids, found.logits[0].float(), caches


@dataclass(frozen=True)
class Traced:
    """A lowered graph that takes ids, positions and caches.

    Attributes:
        module: the graph; all else that it reads are constants of it.
        inputs: a fake tensor for each placeholder.
        names: what each placeholder is, see ``artifact_header.Graph``.
    """

    module: fx.GraphModule
    inputs: tuple[torch.Tensor, ...]
    names: tuple[str, ...]

    @property
    def constants(self) -> dict[str, torch.Tensor]:
        """The tensors that nodes read, by the nodes' targets."""
        nodes = self.module.graph.find_nodes(op="get_attr")
        return {str(node.target): getattr(self.module, str(node.target)) for node in nodes}


def trace_graphs(
    model: nn.Module,
    session: Session,
    ids: torch.Tensor,
    caches: list[torch.Tensor],
    step: Say,
) -> dict[str, Traced]:
    """The graph for prompts, whose rows are a symbol, and that for one token.

    Raises:
        OptionError: the model has no positions as far as the caches' context.
        CaptureError: it cannot be traced as such graphs.
    """
    from qcompile.dynamo import trace
    from qcompile.forward import own_errors
    from qcompile.hf_step import Step

    session.names = parameter_names(model, session.catalogue)
    stepper, name = Step(model), type(model).__name__
    context = caches[0].shape[2]
    copies: Copies = {}
    found: dict[str, Traced] = {}
    for kind, part in (("prompt", ids[:_TRACED]), ("step", ids[:1])):
        step(f"tracing {kind}")
        # The last positions that there are: a model that has fewer fails here.
        given, positions = part[None].clone(), torch.arange(context - len(part), context)
        names: dict[int, str] = {id(cache): str(n) for n, cache in enumerate(caches)}
        names |= {id(given): "ids", id(positions): "positions"}
        if len(part) > 1:
            torch._dynamo.mark_dynamic(given, 1, min=ROWS[0], max=ROWS[1])
            torch._dynamo.mark_dynamic(positions, 0, min=ROWS[0], max=ROWS[1])
        keeper = _Keeper(session, names, copies)
        try:
            with torch.no_grad(), own_errors(name):
                result = trace(stepper.forward, (given, positions, caches), keeper)
        except IndexError as failure:
            raise OptionError(
                f"context={context}",
                f"{name} has no such position: {failure}",
                "as many tokens as it has positions for, or fewer",
                "pass a smaller context",
            ) from failure
        found[kind] = keeper.traced(name, result)
    release_freed()
    return found


class _Keeper:
    """A compiler for dynamo that keeps the lowered graph, and runs it operator by operator."""

    def __init__(self, session: Session, names: Mapping[int, str], copies: Copies) -> None:
        self._session, self._names, self._copies = session, names, copies
        self._found: list[tuple[Traced, dict[str, int]]] = []
        self._results: Sequence[Any] = ()

    def __call__(self, graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Lower a graph; what dynamo calls."""
        from qcompile.outline import without_graph
        from qcompile.pipeline import lower_graph

        program, values = lower_graph(graph_module, inputs, self._session)
        bound = bind_inputs(program.graph_module, values, self._names, self._copies)
        traced = Traced(*bound)
        versions = {name: value._version for name, value in traced.constants.items()}
        self._found.append((traced, versions))
        call = without_graph(program.graph_module)

        def run(*given: Any) -> Any:
            self._results = call(*given)
            return self._results

        return run

    def traced(self, model: str, result: object) -> Traced:
        """The graph of the one call that was traced, and that had this result."""
        if len(self._found) != 1:
            raise CaptureError(model, f"{len(self._found)} graphs of one call", "one", _FIX)
        found, versions = self._found[0]
        changed = [n for n, value in found.constants.items() if value._version != versions[n]]
        kept = [name for name in changed if not _forget(found.module, name)]
        others = [n for n, value in enumerate(self._results) if value is not result]
        kept += _drop_results(found.module, others)
        if kept or len(others) + 1 != len(self._results):
            raise CaptureError(
                model,
                f"its forward changes {', '.join(kept) or 'more than it returns'}",
                "keys and values as all that is kept from token to token",
                _FIX,
            )
        return found


def _drop_results(module: fx.GraphModule, places: Collection[int]) -> list[str]:
    """Drop what dynamo would have set as attributes; the names of those that inputs decide."""
    output = next(iter(module.graph.find_nodes(op="output")))
    results = list(output.args[0])
    found = [results[place] for place in places if isinstance(results[place], fx.Node)]
    output.args = (tuple(value for n, value in enumerate(results) if n not in places),)
    decided = set(module.graph.find_nodes(op="placeholder"))
    for node in module.graph.nodes:
        if decided & set(node.all_input_nodes):
            decided.add(node)
    module.recompile()
    return [node.name for node in found if node in decided]


def _forget(module: fx.GraphModule, name: str) -> bool:
    """Let a call write to a buffer of its own, where it writes before anything reads.

    Before: ``inv_freq.copy_(x); inv_freq * 2``. After: ``fresh = empty_like(inv_freq)``, and the
    same with ``fresh``. False, and nothing changed, where the first use is no such write.
    """
    graph = module.graph
    nodes = [n for n in graph.find_nodes(op="get_attr") if str(n.target) == name]
    first = next(n for n in graph.nodes if set(nodes) & set(n.all_input_nodes))
    if first.op != "call_method" or first.target != "copy_" or first.args[0] not in nodes:
        return False
    with graph.inserting_before(first):
        fresh = graph.call_function(torch.empty_like, (nodes[0],))
    fresh.meta["example_value"] = nodes[0].meta["example_value"]
    for node in nodes:
        node.replace_all_uses_with(fresh, delete_user_cb=lambda user: user is not fresh)
    module.recompile()
    return True


def check_rows(traced: Traced, name: str) -> None:
    """Raise LowerError unless what was compiled holds for every number of rows.

    Tracing and compiling note what they took for granted of sizes; nothing asks for it later.
    """
    from torch._guards import detect_fake_mode

    mode = detect_fake_mode(list(traced.inputs))
    environment = getattr(mode, "shape_env", None)
    for guard in () if environment is None else environment.guards:
        for rows in range(ROWS[0], ROWS[1] + 1):
            # Rows are all the symbols that there are, of ids and of positions.
            if guard.expr.subs(dict.fromkeys(guard.expr.free_symbols, rows)) != True:  # noqa: E712
                raise LowerError(
                    f"code for {name}",
                    f"it holds for rows with {guard.expr} only",
                    f"{ROWS[0]} to {ROWS[1]} rows",
                    _FIX,
                )
