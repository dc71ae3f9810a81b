"""What calibration sees of a model: its calls, and the inputs of its linears.

Comes in: a model, batches, hooks for the time of a call. Goes out: Hessians.
Always holds: every hook and every patched ``forward`` is gone when its ``with`` block ends; padding
that an attention mask marks is not counted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from qcompile.quantizers.expert_matrices import FloatExperts, tokens_of
from qcompile.quantizers.linears import Part
from qcompile.quantizers.settings import Batch


@dataclass
class Gram:
    """The sum of ``x.T x`` over inputs, float32 ``[K, K]``, and how many inputs there were."""

    total: torch.Tensor | None = None
    rows: int = 0

    def add(self, x: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Count inputs ``[..., K]``; of those in a batch's own shape only what ``mask`` keeps."""
        if mask is not None and mask.shape == x.shape[:-1]:
            x = x[mask]
        x = x.detach().flatten(0, -2).to(torch.float32)
        if self.total is None:
            self.total = x.new_zeros((x.shape[-1], x.shape[-1]))
        self.total.addmm_(x.t(), x)
        self.rows += len(x)

    @property
    def hessian(self) -> torch.Tensor | None:
        """The mean of ``x.T x``, or None when no input came."""
        return None if self.total is None or not self.rows else self.total / self.rows


Inputs = Gram | tuple[Gram, ...]


def call(model: nn.Module, batch: Batch) -> Any:
    """Call a model with a batch."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


@dataclass
class Mask:
    """Which places of the batch that runs are no padding: bool ``[B, T]``, None when all are."""

    keeps: torch.Tensor | None = None

    def of(self, batch: Batch) -> None:
        """A batch is about to run."""
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        self.keeps = mask.bool() if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None


def first_input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The tensor a module is called with."""
    return args[0] if args else next(iter(kwargs.values()), None)


@contextlib.contextmanager
def collecting(
    linears: Iterable[Part], leaders: Mapping[str, str], mask: Mask
) -> Iterator[dict[str, Inputs]]:
    """Sum up the inputs of linears while the block runs.

    Args:
        linears: whose inputs; experts have a sum each.
        leaders: for the linears that always get the same input as another: that one's name.
        mask: which of their rows count.

    Yields:
        sums by the names of ``linears``; those that share inputs share one object.
    """
    wanted = list(linears)
    names = {linear.name for linear in wanted}
    own: dict[str, Inputs] = {}
    handles = []
    for linear in wanted:
        if isinstance(linear, FloatExperts):
            grams = own[linear.name] = tuple(Gram() for _ in range(linear.count))
            hook = _sorter(linear, grams, mask)
            handles.append(linear.module.register_forward_pre_hook(hook, with_kwargs=True))
            continue
        leader = leaders.get(linear.name, linear.name)
        if leader != linear.name and leader in names:
            continue
        gram = own[linear.name] = Gram()
        for module in _distinct(linear.modules):
            handles.append(module.register_forward_pre_hook(_adder(gram, mask), with_kwargs=True))
    try:
        yield {name: own[name] if name in own else own[leaders[name]] for name in names}
    finally:
        for handle in handles:
            handle.remove()


def _adder(gram: Gram, mask: Mask) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        gram.add(first_input(args, kwargs), mask.keeps)

    return hook


def _sorter(experts: FloatExperts, grams: Sequence[Gram], mask: Mask) -> Callable[..., None]:
    """Give each expert's sum the tokens that chose it."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x, ids = tokens_of(args, kwargs)
        keeps = mask.keeps
        chosen = ids
        if keeps is not None and keeps.numel() == len(x):
            x, chosen = x[keeps.flatten()], ids[keeps.flatten()]
        for expert in torch.unique(chosen).tolist():
            rows = (chosen == expert).any(-1)
            grams[expert].add(experts.inputs(expert, x[rows]), None)

    return hook


def _distinct(modules: Iterable[nn.Linear]) -> list[nn.Linear]:
    return list({id(module): module for module in modules}.values())


@contextlib.contextmanager
def quiet(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, no gradients and no cache of keys and values, for a while."""
    training = [module for module in model.modules() if module.training]
    configs = [c for c in _configs(model) if getattr(c, "use_cache", False)]
    model.eval()
    for config in configs:
        config.use_cache = False
    try:
        with torch.no_grad():
            yield
    finally:
        for config in configs:
            config.use_cache = True
        for module in training:
            module.training = True


def _configs(model: nn.Module) -> list[Any]:
    found = [getattr(module, "config", None) for module in model.modules()]
    return list({id(config): config for config in found if config is not None}.values())


@contextlib.contextmanager
def patched(modules: Sequence[nn.Module], forward: Callable[..., Any]) -> Iterator[None]:
    """Run another function in the place of the modules' ``forward``."""
    before = [module.__dict__.get("forward") for module in modules]
    for module in modules:
        module.forward = forward
    try:
        yield
    finally:
        for module, own in zip(modules, before, strict=True):
            if own is None:
                del module.forward
            else:
                module.forward = own
