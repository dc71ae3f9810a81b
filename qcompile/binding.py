"""Matching a model's parameters with a checkpoint's tensors.

Comes in: names and shapes of parameters, weights under the model's names. Goes out: one weight for
each parameter.
Always holds: every parameter has exactly one weight and every weight belongs to one parameter, or
the call fails and names the first unmatched ones of both sides. Schemes bring the names; this file
knows none of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from torch import nn

from qcompile.errors import SchemeError
from qcompile.layout import Shape
from qcompile.weight import WeightRef

_SHOWN = 3


def bind(
    parameters: Mapping[str, Shape | None],
    tensors: Mapping[str, WeightRef],
    where: str,
    aliases: Mapping[str, str] | None = None,
) -> dict[str, WeightRef]:
    """One weight for each parameter.

    Args:
        parameters: names and shapes; None where the shape is not known, which checks the name only.
        tensors: weights by the parameter they belong to; a tensor whose name the scheme could not
            translate stands under its own.
        where: the checkpoint, for messages.
        aliases: parameters that may be a second name of another one (a tied head): without a
            tensor of their own they are left out, since the other name carries the weight.

    Returns:
        weights by parameter name, in the order of ``parameters``, each known by that name.

    Raises:
        SchemeError: a parameter without a tensor, a tensor without a parameter, or two shapes.
    """
    known = aliases or {}
    missing = [
        name for name in parameters if name not in tensors and known.get(name, "") not in parameters
    ]
    unused = [weight for name, weight in tensors.items() if name not in parameters]
    if missing or unused:
        raise _unmatched(where, missing, unused)
    bound = {name: tensors[name].renamed(name) for name in parameters if name in tensors}
    for name, weight in bound.items():
        _check_shape(name, parameters[name], weight)
    return bound


def check_identity(
    model: nn.Module, catalogue: Mapping[str, WeightRef], where: str, kept: Collection[str] = ()
) -> None:
    """Raise unless every parameter object of a model has exactly one weight.

    Names do not tell a tied head from a separate one, the parameter objects do.

    Args:
        model: the model whose parameter names gave ``catalogue``.
        catalogue: weights by parameter name.
        where: the checkpoint, for messages.
        kept: parameters that stay as the model has them.

    Raises:
        SchemeError: a parameter has no weight under any of its names, or two different ones.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for group in names.values():
        bound = [name for name in group if name in catalogue]
        if len(bound) > 1:
            raise SchemeError(
                where,
                f"different tensors for {' and '.join(bound)}, which the model ties together",
                "one tensor, or parameters of their own",
                "build the model with tie_word_embeddings=False",
            )
        if not bound and not any(name in kept for name in group):
            raise SchemeError(
                where,
                f"no tensor for {group[0]}, which the model does not tie to another parameter",
                "a tensor for every parameter",
                "build the model with tie_word_embeddings=True, or take a checkpoint that stores "
                f"{group[0]}",
            )


def _check_shape(name: str, needed: Shape | None, weight: WeightRef) -> None:
    if needed is None or tuple(needed) == tuple(weight.shape):
        return
    # Stacked experts are output rows first; a model may keep them the other way round.
    if weight.layout == "experts" and tuple(needed) == (weight.shape[0], *weight.shape[:0:-1]):
        return
    raise SchemeError(
        weight.source,
        f"shape {tuple(weight.shape)}",
        f"shape {tuple(needed)} for the parameter {name}",
        "use the model that this checkpoint was made from",
    )


def _unmatched(where: str, missing: list[str], unused: list[WeightRef]) -> SchemeError:
    reasons = []
    if missing:
        reasons.append(f"missing in the checkpoint: {_first(missing)}")
    if unused:
        reasons.append(f"unused in the checkpoint:  {_first(w.name for w in unused)}")
    return SchemeError(
        where,
        f"{len(missing)} parameters have no tensor and {len(unused)} tensors have no parameter",
        "one tensor for each parameter and one parameter for each tensor",
        "use the model that this checkpoint was made from, or a complete checkpoint",
        reasons=reasons,
    )


def _first(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(listed[:_SHOWN]) + more
