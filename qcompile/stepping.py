"""The graphs of an artifact: one for prompts, one for single tokens.

Comes in: a model that ``qcompile.load`` compiled. Goes out: lowered graphs that take ids, positions
and caches, and hold everything else.
Always holds: the graphs share the session's packed weights; a graph for prompts takes any number of
tokens from ``ROWS[0]`` to ``ROWS[1]``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from qcompile.capture import parameter_names
from qcompile.errors import CaptureError
from qcompile.memory import release_freed
from qcompile.session import Session

Say = Callable[[str], None]

# A graph for fewer rows than the first would be one whose products are those of single tokens;
# more than the last gain nothing, and take memory.
ROWS = (9, 512)
_PROBE = 12  # tokens of the check: a prompt's and two steps'


def example(
    model: nn.Module, context: int
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Some ids ``[T]``, the model's logits ``[T, V]`` of them, and empty caches."""
    from qcompile.hf_step import empty_caches, layers_of

    config: Any = model.config
    size = config.get_text_config().vocab_size
    ids = torch.randint(size, (_PROBE,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = model(input_ids=ids[None], use_cache=True)
    kept = layers_of(found)
    caches = empty_caches(kept, context, type(model).__name__)
    if not caches:
        raise CaptureError(
            type(model).__name__,
            "it returned no keys and values",
            "a causal language model that keeps them from token to token",
            "use qcompile.load for this model",
        )
    if len({cache.dtype for cache in caches}) > 1:
        raise CaptureError(
            type(model).__name__, "caches of several dtypes", "one dtype", "use qcompile.load"
        )
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
    """The graph for prompts, whose rows are a symbol, and that for one token."""
    from qcompile.dynamo import trace
    from qcompile.hf_step import Step

    session.names = parameter_names(model, session.catalogue)
    stepper = Step(model)
    found: dict[str, Traced] = {}
    for name, part in (("prompt", ids[:-2]), ("step", ids[-2:-1])):
        step(f"tracing {name}")
        given, positions = part[None].clone(), torch.arange(len(part))
        names: dict[int, str] = {id(cache): str(n) for n, cache in enumerate(caches)}
        names |= {id(given): "ids", id(positions): "positions"}
        if len(part) > 1:
            torch._dynamo.mark_dynamic(given, 1, min=ROWS[0], max=ROWS[1])
            torch._dynamo.mark_dynamic(positions, 0, min=ROWS[0], max=ROWS[1])

        keeper = _Keeper(session, names)
        with torch.no_grad():
            trace(stepper.forward, (given, positions, caches), keeper)
        found[name] = keeper.traced()
    release_freed()
    return found


class _Keeper:
    """A compiler for dynamo that keeps the lowered graph, and runs it operator by operator."""

    def __init__(self, session: Session, names: Mapping[int, str]) -> None:
        self._session, self._names = session, names
        self._found: list[Traced] = []

    def __call__(self, graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Lower a graph; what dynamo calls."""
        from qcompile.bind_inputs import bind_inputs
        from qcompile.outline import without_graph
        from qcompile.pipeline import lower_graph

        program, values = lower_graph(graph_module, inputs, self._session)
        self._found.append(Traced(*bind_inputs(program.graph_module, values, self._names)))
        return without_graph(program.graph_module)

    def traced(self) -> Traced:
        """The graph of the one call that was traced."""
        (found,) = self._found
        return found
