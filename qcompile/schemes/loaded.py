"""Models that another library has already loaded from a quantized checkpoint.

Comes in: a model in which some modules hold ``qweight`` and ``scales`` for a weight, as those
of GPTQModel, AutoGPTQ and AutoAWQ do. Goes out: the same model with ``nn.Linear`` in their places,
and a checkpoint in memory that has the weights.
Always holds: the tensors are read where they are; an error puts the modules back. A module whose
tensors its library has rearranged does not have the shapes of its scheme and is refused.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import nn

from qcompile.conv1d import Exchange
from qcompile.errors import OptionError, SchemeError
from qcompile.modules import packed_modules
from qcompile.schemes.awq import modules as awq
from qcompile.schemes.awq.scheme import read_rules as awq_rules
from qcompile.schemes.folder.checkpoint import FolderCheckpoint
from qcompile.schemes.folder.settings import Settings, method_of
from qcompile.schemes.folder.stored import StoredTensor, in_memory
from qcompile.schemes.gptq import modules as gptq
from qcompile.schemes.gptq.rules import Rule, read_rules
from qcompile.schemes.gptq.zeros import ZeroRule
from qcompile.weight import WeightRef

_TENSORS = ("qweight", "qzeros", "scales", "g_idx")


@contextlib.contextmanager
def loaded(model: nn.Module, scheme: str) -> Iterator[FolderCheckpoint]:
    """The weights of a loaded model as a checkpoint; an error inside puts the modules back.

    Args:
        model: its quantized modules become ``nn.Linear`` on the meta device.
        scheme: ``gptq``, ``awq`` or ``auto``.

    Raises:
        OptionError: the scheme is another.
        SchemeError: settings are missing, or contradict the tensors.
    """
    modules = packed_modules(model)
    settings = _settings(model, modules)
    method = method_of(settings)
    if method not in ("gptq", "awq") or scheme not in ("auto", method):
        raise OptionError(
            f"scheme={scheme!r}",
            f"the model holds weights of the scheme {method}",
            "gptq or awq, the one that the model was loaded with",
            'use scheme="auto"',
        )
    stored = {f"{path}.{name}": t for path, m in modules.items() for name, t in _stored(path, m)}
    read = _gptq if method == "gptq" else _awq
    weights, used = read(settings, stored, modules)
    done = _exchange(model, modules, {name: ref.shape for name, ref in weights.items()})
    try:
        place = Path(type(model).__name__)
        yield FolderCheckpoint(place, method, settings, stored, weights, used, _remarks(settings))
    except BaseException:
        for exchange in done:
            exchange.undo()
        raise


def _settings(model: nn.Module, modules: Mapping[str, nn.Module]) -> Settings:
    """The settings that the model was loaded with, or what its modules say of themselves."""
    found = getattr(getattr(model, "config", None), "quantization_config", None)
    convert = getattr(found, "to_dict", None)
    values = convert() if callable(convert) else found
    if isinstance(values, dict) and values:
        plain = {k: v.value if isinstance(v, enum.Enum) else v for k, v in values.items()}
        return Settings(f"{type(model).__name__}.config.quantization_config", plain)
    path, module = next(iter(modules.items()))
    bits = getattr(module, "bits", getattr(module, "w_bit", None))
    group = getattr(module, "group_size", None)
    if bits is None or group is None:
        raise SchemeError(
            f"{type(model).__name__}: {path}",
            "a packed weight without settings",
            "model.config.quantization_config, or modules with bits and group_size",
            "pass the folder it was loaded from as checkpoint",
        )
    values = {
        "bits": int(bits),
        "group_size": int(group),
        "sym": bool(getattr(module, "sym", True)),
    }
    if hasattr(module, "w_bit"):
        values = {**values, "sym": False, "quant_method": "awq"}
    else:
        values = {**values, "quant_method": "gptq"}
    return Settings(f"{type(model).__name__}: {path}", values)


def _stored(path: str, module: nn.Module) -> Iterator[tuple[str, StoredTensor]]:
    for name in _TENSORS:
        tensor = getattr(module, name, None)
        if isinstance(tensor, torch.Tensor):
            where = Path(type(module).__name__)
            yield name, in_memory(f"{path}.{name}", tensor.detach(), where)


def _gptq(
    settings: Settings, stored: Mapping[str, StoredTensor], modules: Mapping[str, nn.Module]
) -> tuple[Mapping[str, WeightRef], set[str]]:
    rules = read_rules(settings)

    def rule_of(module: str) -> Rule | None:
        rule = rules.of(module)
        zeros = _zeros_in_memory(modules[module])
        if rule is None or zeros is None:
            return rule
        return Rule(rule.bits, rule.group, rule.sym, rule.desc_act, zeros, rule.origin)

    return gptq.read_modules(stored, rule_of)


def _zeros_in_memory(module: nn.Module) -> ZeroRule | None:
    """GPTQModel turns zero points of v1 into those of v2 while it loads, and says so."""
    told = getattr(module, "qzero_format", None)
    if not callable(told):
        return None
    return "stored" if told() == 2 else None


def _awq(
    settings: Settings, stored: Mapping[str, StoredTensor], modules: Mapping[str, nn.Module]
) -> tuple[Mapping[str, WeightRef], set[str]]:
    rule_of, _ = awq_rules(settings)
    return awq.read_modules(stored, rule_of)


def _exchange(
    model: nn.Module, modules: Mapping[str, nn.Module], shapes: Mapping[str, tuple[int, ...]]
) -> list[Exchange]:
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    done = []
    for path, module in modules.items():
        rows, columns = shapes[f"{path}.weight"]
        kind = dtype or module.get_buffer("scales").dtype
        linear = nn.Linear(columns, rows, bias=False, device="meta", dtype=kind)
        bias = getattr(module, "bias", None)
        if isinstance(bias, torch.Tensor):
            linear.bias = nn.Parameter(bias.detach(), requires_grad=False)
        parent, _, name = path.rpartition(".")
        exchange = Exchange(model.get_submodule(parent), name, module)
        setattr(exchange.parent, name, linear.train(module.training))
        done.append(exchange)
    return done


def _remarks(settings: Settings) -> tuple[str, ...]:
    named = settings.values.get("checkpoint_format") or settings.values.get("format")
    if method_of(settings) != "gptq" or settings.values.get("sym", True) or named:
        return ()
    return ("zero points are taken as GPTQ's first format has them, unless a module tells",)
