"""The lowered graph goes to the target's compiler.

Comes in: a lowered graph and example inputs. Goes out: a callable.
Always holds: the callable takes exactly the inputs whose placeholders are left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from qcompile.errors import OptionError, nearest

Emitter = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


def _inductor(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    # Imported here: Inductor costs a second and 40 MB that a plan does not need.
    from torch._inductor.compile_fx import compile_fx

    from qcompile.inductor_stamp import settings
    from qcompile.outline import outline

    patches = settings()

    def compiler(graph: fx.GraphModule, given: Sequence[Any]) -> Callable[..., Any]:
        compiled: Any = compile_fx(graph, list(given), config_patches=patches)
        return compiled  # type: ignore[no-any-return]

    return outline(graph_module, inputs, compiler)


def _eager(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    from qcompile.outline import without_graph

    return without_graph(graph_module)


EMITTERS: dict[str, Emitter] = {"inductor": _inductor, "eager": _eager}


def register_emitter(name: str, emitter: Emitter) -> None:
    """Make an emitter known that a backend brings."""
    EMITTERS[name] = emitter


def emitter_of(name: str) -> Emitter:
    """The emitter of this name. Raises OptionError for an unknown one."""
    if name not in EMITTERS:
        raise OptionError(
            f"emitter {name!r}",
            "unknown",
            f"one of {', '.join(EMITTERS)}",
            f"name a known emitter{nearest(name, EMITTERS)}",
        )
    return EMITTERS[name]
