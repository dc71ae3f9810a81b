"""What a module's own structure says, and how weights are put into it.

Comes in: a module and a catalogue. Goes out: its sites without a trace; or the module with its
weights bound. Always holds: a quantized parameter is never given storage, and reading one that is
still unbound raises instead of computing with garbage.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

import torch
from torch import nn

from qcompile.buffers import buffer_values
from qcompile.errors import SchemeError
from qcompile.experts import ExpertsModule, experts_modules
from qcompile.experts_layout import experts_weight
from qcompile.site import EmbeddingSite, ExpertsSite, LinearSite, Site
from qcompile.spec import is_quantized
from qcompile.stand_in import StandIns, stand_in
from qcompile.weight import WeightRef


def module_sites(model: nn.Module, catalogue: Mapping[str, WeightRef]) -> list[Site]:
    """The sites of modules that plainly are linears or embeddings; a trace may show more."""
    canonical: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in catalogue or id(parameter) not in canonical:
            canonical[id(parameter)] = name
    sites: list[Site] = []
    layers = {found.path: found for found in experts_modules(model)}
    for path, module in model.named_modules():
        if path in layers:
            sites += _experts_site(layers[path], catalogue)
        if not isinstance(module, (nn.Linear, nn.Embedding)):
            continue
        weight = catalogue.get(canonical.get(id(module.weight), ""))
        if weight is None or not is_quantized(weight.spec):
            continue
        if isinstance(module, nn.Linear):
            sites.append(LinearSite(path, weight, module.bias is not None))
        else:
            sites.append(EmbeddingSite(path, weight))
    return sites


def _experts_site(module: ExpertsModule, catalogue: Mapping[str, WeightRef]) -> list[Site]:
    found = [catalogue.get(name) for name in (module.up, module.down)]
    up, down = (w if w is not None and is_quantized(w.spec) else None for w in found)
    if up is None and down is None:
        return []
    weight = experts_weight(module.path, up, down)
    activation = str(replace(module.activation, interleaved=False))
    return [ExpertsSite(module.path, weight, module.up_bias is not None, activation)]


def packed_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that hold ``qweight`` and ``scales``, as other libraries load them, by path."""
    return {
        path: module
        for path, module in model.named_modules()
        if all(isinstance(getattr(module, n, None), torch.Tensor) for n in ("qweight", "scales"))
    }


def install_weights(
    model: nn.Module,
    catalogue: Mapping[str, WeightRef],
    dtype: torch.dtype | None,
    device: torch.device | None = None,
) -> None:
    """Bind every parameter: a stand-in where the checkpoint quantizes it, its values otherwise.

    Args:
        model: changed in place; tied parameters stay tied.
        catalogue: weights by canonical parameter name, and by buffer.
        dtype: dtype of the float parameters, or None to keep each parameter's.
        device: where parameters and buffers go, or None to leave them on the CPU.
    """
    buffers = buffer_values(model, catalogue)
    _check_buffers(model, buffers)
    names: dict[int, list[str]] = {}
    for name, named in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(named), []).append(name)
    fake = StandIns()
    bound: dict[int, nn.Parameter] = {}
    old: list[nn.Parameter] = []  # keeps the ids above from being reused
    for parameter in model.parameters():
        old.append(parameter)
        known = [n for n in names[id(parameter)] if n in catalogue]
        weight = catalogue[known[0]] if known else None
        bound[id(parameter)] = _bind(parameter, weight, dtype, fake, device)
    # Nothing below fails, so that a failing call leaves the module as it was.
    for path, module in model.named_modules():
        for key, held in module._parameters.items():
            if held is not None:
                module._parameters[key] = bound[id(held)]
        for key, buffer in module._buffers.items():
            if buffer is not None:
                filled = buffers.get(f"{path}.{key}" if path else key, buffer)
                module._buffers[key] = filled.to(device) if device is not None else filled


def _bind(
    parameter: nn.Parameter,
    weight: WeightRef | None,
    dtype: torch.dtype | None,
    fake: StandIns,
    device: torch.device | None,
) -> nn.Parameter:
    wanted = dtype if dtype and parameter.is_floating_point() else parameter.dtype
    if weight is None:
        return nn.Parameter(parameter.detach().to(device, wanted), requires_grad=False)
    if is_quantized(weight.spec):
        return stand_in(parameter.shape, wanted, fake, device)
    values = weight.dequantize().to(wanted)
    if values.shape != parameter.shape:
        raise _other_way_round(weight, parameter)
    # A float32 tensor may be a view of the file, whose pages count as ours until they are dropped.
    bound = nn.Parameter(values.to(device, copy=True), requires_grad=False)
    weight.release()
    return bound


def release(modules: Iterable[nn.Module], key: str = "weight") -> None:
    """Put one stand-in in the place of the parameter ``key`` that some modules share."""
    held = list(modules)
    old = held[0].get_parameter(key)
    fake = StandIns()
    new = stand_in(tuple(old.shape), old.dtype, fake)
    for module in held:
        module._parameters[key] = new


def _other_way_round(weight: WeightRef, parameter: nn.Parameter) -> SchemeError:
    return SchemeError(
        weight.source,
        f"experts in floats, output rows first: {tuple(weight.shape)}",
        f"floats the way the model keeps them: {tuple(parameter.shape)}",
        "quantize the experts, or store them in one tensor as the model does",
    )


def _check_buffers(model: nn.Module, filled: Collection[str]) -> None:
    left = [n for n, buffer in model.named_buffers() if buffer.is_meta and n not in filled]
    if left:
        raise SchemeError(
            type(model).__name__,
            f"{len(left)} buffers have no values: {', '.join(left[:5])}",
            "buffers with values; a checkpoint holds parameters only",
            "build the module with its buffers on the CPU "
            "(accelerate.init_empty_weights(include_buffers=False))",
        )
