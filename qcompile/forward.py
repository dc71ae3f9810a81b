"""The compiled ``forward`` in the place of a module's own.

Comes in: a module whose weights are bound, and its session. Goes out: the same module, whose
callers, hooks and ``generate`` run compiled code.
Always holds: one thread is inside at a time; errors of ours come without dynamo's around them; a
gradient that a product on quantized weights would lose is an error, never a silent None.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn
from torch.autograd import forward_ad

from qcompile.errors import LowerError, OptionError, QCompileError
from qcompile.sealed import seal
from qcompile.session import Session

# Of the process: tracing sets global flags of torch (a compiled function that another thread calls
# while one is traced raises), and kernels use every core anyway.
_ONE_AT_A_TIME = threading.RLock()


def install_forward(model: nn.Module, session: Session, fullgraph: bool) -> None:
    """Compile ``forward`` in place, on its first call."""
    original = model.forward
    made: list[Callable[..., Any]] = []

    def first(*args: Any, **kwargs: Any) -> Any:
        with _ONE_AT_A_TIME:
            if not made:
                # Now, not before: dynamo takes a second to import.
                made.append(_compiled(model, original, session, fullgraph))
        return made[0](*args, **kwargs)

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return (made[0] if made else first)(*args, **kwargs)

    model.forward = forward
    seal(model)
    # object.__setattr__: a module would look for parameters in them.
    object.__setattr__(model, "qcompile", session)
    # Weights are named by identity: one that the user replaces must not leave its id to another.
    object.__setattr__(model, "_qcompile_named", tuple(model.parameters()))


def _compiled(
    model: nn.Module, original: Callable[..., Any], session: Session, fullgraph: bool
) -> Callable[..., Any]:
    from qcompile.dynamo import compile_forward

    run, settings = compile_forward(original, session, fullgraph)
    name = type(model).__name__

    def call(*args: Any, **kwargs: Any) -> Any:
        if forward_ad._current_level >= 0:
            _refuse_tangents(name, (args, kwargs))
        with _ONE_AT_A_TIME, torch.no_grad(), settings(), own_errors(name):
            result = run(*args, **kwargs)
        if not torch.is_grad_enabled():
            return result
        return _without_backward(result, model, (args, kwargs))

    # A torch.compile around the model, as generate makes one on GPUs, must not look into it: what
    # it would find are stand-ins.
    apart: Callable[..., Any] = torch.compiler.disable(call)
    return apart


@contextlib.contextmanager
def own_errors(model: str) -> Iterator[None]:
    """Tell what cannot be traced as our error, and let ours through without dynamo's around it."""
    try:
        yield
    except QCompileError:
        raise
    except Exception as failure:
        from qcompile.dynamo import as_capture_error

        inner = getattr(failure, "inner_exception", None)
        if isinstance(inner, QCompileError):
            raise inner from None
        refused = as_capture_error(failure, model) or _as_lower_error(failure, model)
        if refused is not None:
            raise refused from failure
        raise


def _as_lower_error(failure: Exception, model: str) -> LowerError | None:
    """What a native op says of its inputs, told as our errors are; None for another failure."""
    told = re.search(r"(qcompile_\w+): (.+)", str(failure))
    if told is None or not isinstance(failure, RuntimeError):
        return None
    return LowerError(
        f"{model}, an op of {told[1]}",
        told[2],
        "inputs of the dtype and the columns that the model was compiled for",
        "cast or reshape what is given to the model",
    )


# **** gradients ****


class _NoBackward(torch.autograd.Function):
    """Passes a tensor on; a backward through it raises OptionError."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, asks: torch.Tensor, model: str) -> torch.Tensor:
        """``value`` as it is, tied to a tensor that asks for a gradient."""
        ctx.model = model
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> NoReturn:
        """Refuse."""
        raise OptionError(
            ctx.model,
            "backward was called through a compiled model",
            "a model whose products have gradients; products on quantized weights have none here",
            "train the adapters on the float model and attach them to this one; where no gradient "
            "is wanted, call it under torch.no_grad()",
        )


def _refuse_tangents(model: str, given: Any) -> None:
    """Raise OptionError where an input carries a tangent, which the outputs would not have."""
    from torch.utils._pytree import tree_leaves

    for leaf in tree_leaves(given):
        if isinstance(leaf, torch.Tensor) and forward_ad.unpack_dual(leaf).tangent is not None:
            raise OptionError(
                model,
                "an input carries a tangent, and forward-mode derivatives are asked for",
                "inputs without; products on quantized weights have no derivatives here",
                "call it outside of forward_ad.dual_level(), or differentiate the float model",
            )


def _without_backward(result: Any, model: nn.Module, given: Any) -> Any:
    """Outputs that raise in a backward, where an input or a parameter asks for a gradient."""
    from torch.utils._pytree import tree_leaves, tree_map_only

    inputs = (leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor))
    asks = next((t for t in (*inputs, *model.parameters()) if t.requires_grad), None)
    if asks is None:
        return result

    name = type(model).__name__

    def tied(value: torch.Tensor) -> torch.Tensor:
        if not value.is_floating_point():
            return value
        return _NoBackward.apply(value, asks, name)  # type: ignore[no-any-return, no-untyped-call]

    return tree_map_only(torch.Tensor, tied, result)
