"""From the tensors of a layer's experts to the parameters of its experts module.

Comes in: an open file and its configuration. Goes out: one weight for each three-dimensional
parameter, and one for each bias.
Always holds: every expert is there or the first missing one is named; which rows are gates is
known by the tensors' names. Quantized weights stay as stored, output rows first.

Files hold the matrices of all experts in one tensor ``ffn_{gate,up,down}_exps`` ``[E, N, K]``, gate
and up in one as ``ffn_gate_up_exps``, or, old ones, every expert in its own ``ffn_gate.E``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from qcompile.errors import SchemeError
from qcompile.experts_layout import experts_weight, split_experts, stack_experts
from qcompile.layout import QuantizedTensor
from qcompile.schemes.gguf.entries import Mixture
from qcompile.schemes.gguf.reader import GGUFFile
from qcompile.schemes.gguf.values import Configuration
from qcompile.site import ExpertsSite
from qcompile.spec import FloatSpec, Role, is_quantized
from qcompile.unify import unified
from qcompile.weight import Rows, WeightRef

_PACKED = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down|gate_up)_exps\.(weight|bias)")
_SINGLE = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)\.(\d+)\.weight")
_UP: tuple[Role, ...] = ("gate", "up", "gate_up")


@dataclass
class _Layer:
    """The tensors of one layer's experts, by role."""

    packed: dict[str, WeightRef]
    single: dict[str, dict[int, WeightRef]]
    bias: dict[str, WeightRef]


def experts_parameters(
    file: GGUFFile, configuration: Configuration
) -> tuple[dict[str, WeightRef], set[str]]:
    """Weights of the experts by parameter name, and the names of the tensors they are made of.

    Raises:
        SchemeError: an expert or a matrix is missing, or shapes contradict the metadata.
    """
    mixture = configuration.architecture.mixture
    if mixture is None:
        return {}, set()
    layers, used = _layers(file)
    found: dict[str, WeightRef] = {}
    for number, layer in layers.items():
        path = f"model.layers.{number}.{mixture.module}"
        where = f"{file.path}: blk.{number}"
        for weight in (
            *_matrices(layer, path, where, mixture, configuration.values),
            *_biases(layer, path, where, mixture),
        ):
            found[weight.name] = weight
    return found, used


def experts_site(
    path: str, mixture: Mixture, weights: Mapping[str, WeightRef]
) -> ExpertsSite | None:
    """The site of one layer; None where its experts are floats."""
    pair = weights.get(f"{path}.gate_up_proj"), weights.get(f"{path}.down_proj")
    up, down = (w if w is not None and is_quantized(w.spec) else None for w in pair)
    if up is None and down is None:
        return None
    return ExpertsSite(path, experts_weight(path, up, down), mixture.biased)


def experts_names(path: str, mixture: Mixture) -> list[str]:
    """Names of the parameters of an experts module."""
    names = [f"{path}.gate_up_proj", f"{path}.down_proj"]
    return [*names, *(f"{name}_bias" for name in names)] if mixture.biased else names


def _layers(file: GGUFFile) -> tuple[dict[int, _Layer], set[str]]:
    layers: dict[int, _Layer] = {}
    used: set[str] = set()
    for name in file.tensors:
        packed, single = _PACKED.fullmatch(name), _SINGLE.fullmatch(name)
        match = packed or single
        if match is None:
            continue
        used.add(name)
        layer = layers.setdefault(int(match[1]), _Layer({}, {}, {}))
        weight = file.weight(name)
        if single is not None:
            layer.single.setdefault(single[2], {})[int(single[3])] = weight
        else:
            (layer.packed if match[3] == "weight" else layer.bias)[match[2]] = weight
    return layers, used


def _matrices(
    layer: _Layer, path: str, where: str, mixture: Mixture, values: Mapping[str, object]
) -> list[WeightRef]:
    count = values[mixture.count]
    assert isinstance(count, int)
    roles = {role: _members(layer, role, where, count) for role in (*_UP, "down")}
    up: dict[Role, Sequence[WeightRef]] = {}
    if roles["gate_up"]:
        up["gate_up"] = roles["gate_up"]
    else:
        up = {"gate": roles["gate"], "up": roles["up"]}
    for role, members in {**up, "down": roles["down"]}.items():
        if not members:
            raise _missing(where, f"no {role} matrices of its experts")
    made = [
        stack_experts(f"{path}.gate_up_proj", up, where),
        stack_experts(f"{path}.down_proj", {"down": roles["down"]}, where),
    ]
    return [_turned(w) if mixture.turned and not is_quantized(w.spec) else w for w in made]


def _members(layer: _Layer, role: str, where: str, count: int) -> list[WeightRef]:
    """The matrices of all experts that play one part; none where no tensor holds them."""
    if role in layer.packed:
        weight = layer.packed[role]
        if len(weight.shape) != 3 or weight.shape[0] != count:
            raise SchemeError(
                weight.source,
                f"shape {weight.shape}",
                f"{count} matrices, one for each expert",
                "convert the file again; its shapes and its metadata disagree",
            )
        return split_experts(weight)
    known = layer.single.get(role, {})
    for expert in range(count) if known else ():
        if expert not in known:
            raise _missing(where, f"no {role} matrix of expert {expert}")
    if len(known) > count:
        raise SchemeError(
            where,
            f"a {role} matrix of expert {max(known)}",
            f"experts 0 to {count - 1}, from the metadata",
            "convert the file again; its tensors and its metadata disagree",
        )
    return unified([known[expert] for expert in range(count)]) if known else []


def _turned(weight: WeightRef) -> WeightRef:
    """Floats with input rows first, and gate and up in turns, as the model keeps them."""
    experts, rows, columns = weight.shape
    halves = "gate_up_proj" in weight.name

    def read(wanted: Rows) -> QuantizedTensor:
        data = weight.read(wanted).dequantize()
        if halves:
            data = _in_turns(data, 1)
        data = data.transpose(1, 2).contiguous()
        return QuantizedTensor(spec, "float", tuple(data.shape), {"data": data})

    spec = FloatSpec(torch.float32)
    shape = (experts, columns, rows)
    return replace(weight, spec=spec, layout="float", shape=shape, read=read)


def _biases(layer: _Layer, path: str, where: str, mixture: Mixture) -> list[WeightRef]:
    """The model's biases ``[E, 2 I]`` and ``[E, H]``, in the model's own order."""
    if not mixture.biased:
        return [w.renamed(f"{path}.ffn_{role}_exps.bias") for role, w in layer.bias.items()]
    bias = layer.bias
    parts = [bias["gate_up"]] if "gate_up" in bias else [bias.get("gate"), bias.get("up")]
    if None in parts or "down" not in bias:
        raise _missing(where, "no biases of its experts")
    halves = [part for part in parts if part is not None]

    def read(rows: Rows) -> QuantizedTensor:
        data = torch.cat([half.read(rows).dequantize() for half in halves], -1)
        if mixture.turned:
            data = _in_turns(data, -1)
        return QuantizedTensor(spec, "float", tuple(data.shape), {"data": data})

    spec = FloatSpec(torch.float32)
    width = sum(half.shape[-1] for half in halves)
    shape = (*halves[0].shape[:-1], width)
    joined = replace(
        halves[0],
        name=f"{path}.gate_up_proj_bias",
        spec=spec,
        layout="float",
        shape=shape,
        read=read,
    )
    return [joined, bias["down"].renamed(f"{path}.down_proj_bias")]


def _in_turns(data: torch.Tensor, dim: int) -> torch.Tensor:
    """Gate and up, one after the other along a dimension, in turns.

    >>> _in_turns(torch.tensor([0, 1, 2, 10, 11, 12]), 0).tolist()
    [0, 10, 1, 11, 2, 12]
    """
    halves = data.chunk(2, dim)
    place = dim % data.dim()
    return torch.stack(halves, place + 1).flatten(place, place + 1)


def _missing(where: str, found: str) -> SchemeError:
    return SchemeError(
        where, found, "one of each for every expert", "convert or download the file again"
    )
