"""Which experts a compiled model chose, and an exact model that has to choose the same.

Comes in: a model compiled for an Ascend device under emulation, a plain one. Goes out: the first
one's choices, and the logits that the second one has with these.
Always holds: the choices are those that the lowered graph hands to the device's routing operator.

A choice between experts is a jump: where two of them are closer than a dtype can tell, rounding
alone decides, and the logits of neither answer approach the other's. So both are taken apart: the
logits for the same choices, and whether choices differ where the dtype tells the experts apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from qcompile.backends import npu


class _Recorder(TorchDispatchMode):
    def __init__(self, choices: list[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.choices = choices

    def __torch_dispatch__(
        self, function: Any, types: Any, given: Any = (), named: Any = None
    ) -> Any:
        if function is torch.ops.npu.npu_moe_init_routing_v2.default:
            self.choices.append(given[1].long())
        return function(*given, **(named or {}))


@contextmanager
def recorded_choices() -> Iterator[list[torch.Tensor]]:
    """The experts ``[T, k]`` that graphs compiled inside choose, one tensor for each layer run."""
    choices: list[torch.Tensor] = []
    original: Callable[..., Any] = npu.emulated

    def emulated(call: Callable[..., Any], target: Any, wide: bool) -> Callable[..., Any]:
        inner = original(call, target, wide)

        def run(*given: Any) -> Any:
            with _Recorder(choices):
                return inner(*given)

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(npu, "emulated", emulated)
        yield choices


def with_choices(
    model: Any, ids: torch.Tensor, choices: list[torch.Tensor]
) -> tuple[torch.Tensor, list[float]]:
    """Logits of a plain Qwen3 model whose routers choose the given experts.

    Returns:
        logits ``[1, T, V]``, and for each choice that the model would have made otherwise how far
        the two experts' router logits are apart, in units of the largest one's last place in
        bfloat16.
    """
    gaps: list[float] = []

    def router(module: Any, choice: torch.Tensor) -> Callable[[torch.Tensor], Any]:
        def forward(hidden: torch.Tensor) -> Any:
            logits = torch.nn.functional.linear(
                hidden.reshape(-1, module.hidden_dim), module.weight
            )
            shares = logits.softmax(-1, dtype=torch.float32)
            own = shares.topk(module.top_k, -1).indices
            gaps.extend(_gaps(logits, own, choice))
            given = shares.gather(-1, choice)
            if module.norm_topk_prob:
                given = given / given.sum(-1, keepdim=True)
            return logits, given, choice

        return forward

    layers = [layer.mlp.gate for layer in model.model.layers]
    assert len(layers) == len(choices)
    for module, choice in zip(layers, choices, strict=True):
        module.forward = router(module, choice)
    try:
        return model(ids).logits, gaps
    finally:
        for module in layers:
            del module.__dict__["forward"]


def _gaps(logits: torch.Tensor, own: torch.Tensor, choice: torch.Tensor) -> Iterator[float]:
    for scores, left, taken in zip(logits, own.tolist(), choice.tolist(), strict=True):
        dropped, added = set(left) - set(taken), set(taken) - set(left)
        if dropped:
            gap = max(float(scores[e]) for e in dropped) - min(float(scores[e]) for e in added)
            yield gap / last_place(scores)


def last_place(logits: torch.Tensor) -> float:
    """The unit in the last place that bfloat16 has for the largest of some numbers."""
    largest = logits.float().abs().max()
    return float(torch.exp2(largest.log2().floor()) * torch.finfo(torch.bfloat16).eps)
