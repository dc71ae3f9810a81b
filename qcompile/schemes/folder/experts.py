"""Experts that a folder stores one by one.

Comes in: weights by the folder's names. Goes out: one weight for each three-dimensional parameter
of the model, and one site a layer.
Always holds: every expert from 0 to E - 1 is there, or the first missing one is named; which rows
are gates is known by name, and by the type of the model where one matrix holds both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from qcompile.errors import SchemeError
from qcompile.experts_layout import experts_weight, stack_experts
from qcompile.layout import QuantizedTensor, Shape
from qcompile.register import roles_at
from qcompile.site import ExpertsSite
from qcompile.spec import FloatSpec, Role, is_quantized
from qcompile.unify import unified
from qcompile.weight import Rows, WeightRef

_EXPERT = re.compile(r"(?P<layer>.+)\.(?P<expert>\d+)\.(?P<part>\w+)\.(?P<kind>weight|bias)")
# GPTQModel's names for gpt-oss.
_LISTED = re.compile(
    r"(?P<layer>.+)\.(?P<part>gate_up_proj|down_proj)s\.(?P<expert>\d+)\.(?P<kind>weight|bias)"
)
# Mixtral's own code calls gate, down and up so.
_ROLES: Mapping[str, Role] = {
    "gate_proj": "gate",
    "up_proj": "up",
    "gate_up_proj": "gate_up",
    "down_proj": "down",
    "w1": "gate",
    "w2": "down",
    "w3": "up",
}
_LIST = "experts"  # what every model of transformers calls the list
# Modules that transformers calls otherwise than the tools' checkpoints do.
_RENAMED = ((".block_sparse_moe.", ".mlp."),)
_UP: tuple[Role, ...] = ("gate", "up", "gate_up")
# Types of models that keep the columns of gate and up in turns.
_IN_TURNS = ("gpt_oss",)


@dataclass
class ExpertsLayer:
    """The experts of one layer.

    Attributes:
        path: the module, as the folder calls it.
        members: for each role the weight of every expert, by number.
        biases: the same of their biases.
        names: the folder's names of all of them.
        in_turns: whether a matrix or bias of gate and up has them in turns.
    """

    path: str
    members: dict[Role, dict[int, WeightRef]] = field(default_factory=dict)
    biases: dict[Role, dict[int, WeightRef]] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    in_turns: bool = False

    def stacked(self, name: str, roles: tuple[Role, ...], count: int | None = None) -> WeightRef:
        """The weights of some roles as one.

        Args:
            name: the name of the result.
            roles: those of them that the layer has.
            count: how many experts there have to be; as many as there are when None.

        Raises:
            SchemeError: an expert or a role is missing.
        """
        found = self._complete(self.members, roles, count, "matrix")
        stacks = {role: unified(members) for role, members in found.items()}
        if self.in_turns and "gate_up" in stacks:
            stacks["gate_up"] = [w.with_rows(_gates_first(w.shape[0])) for w in stacks["gate_up"]]
        return stack_experts(name, stacks, self._where)

    def stacked_bias(self, name: str, roles: tuple[Role, ...], count: int) -> WeightRef:
        """The biases of some roles as one ``[E, N]``, in the order in which the model has them.

        Raises:
            SchemeError: one is missing.
        """
        found = self._complete(self.biases, roles, count, "bias")
        mixed = self.in_turns and "gate" in found
        spec = FloatSpec(torch.float32)

        def read(rows: Rows) -> QuantizedTensor:
            parts = [torch.stack([w.dequantize() for w in known]) for known in found.values()]
            whole = torch.stack(parts, -1).flatten(1) if mixed else torch.cat(parts, 1)
            data = whole[rows]
            return QuantizedTensor(spec, "float", tuple(data.shape), {"data": data})

        width = sum(known[0].shape[0] for known in found.values())
        source = f"{self._where}: {name}"
        return WeightRef(name, spec, "float", (count, width), read, source)

    def _complete(
        self,
        kept: dict[Role, dict[int, WeightRef]],
        roles: tuple[Role, ...],
        count: int | None,
        what: str,
    ) -> dict[Role, list[WeightRef]]:
        """Every expert's part in those of some roles that the layer has."""
        found = {role: kept[role] for role in roles if role in kept}
        number = count or 1 + max((max(known) for known in found.values()), default=0)
        for role in found or roles:
            for expert in range(number):
                if expert not in kept.get(role, {}):
                    raise self._missing(f"{role} {what}", expert, number)
        extra = [e for known in found.values() for e in known if e >= number]
        if extra:
            raise SchemeError(
                self._where,
                f"expert {extra[0]}",
                f"experts 0 to {number - 1}",
                "use the model that this checkpoint was made from",
            )
        return {role: [known[e] for e in range(number)] for role, known in found.items()}

    @property
    def _where(self) -> str:
        first = next(iter(next(iter(self.members.values())).values()))
        return f"{first.source.rpartition(': ')[0]}: {self.path}"

    def _missing(self, what: str, expert: int, count: int) -> SchemeError:
        return SchemeError(
            self._where,
            f"no {what} of expert {expert}",
            f"one for each of the {count} experts",
            "download the checkpoint again",
        )


def experts_layers(
    tensors: Mapping[str, WeightRef], model_type: object = None
) -> dict[str, ExpertsLayer]:
    """The layers whose experts are stored one by one, by the folder's path.

    Args:
        tensors: weights under the folder's names.
        model_type: what the configuration calls the model.
    """
    layers: dict[str, ExpertsLayer] = {}
    for name, weight in tensors.items():
        match = _EXPERT.fullmatch(name) or _LISTED.fullmatch(name)
        if match is None:
            continue
        roles = _roles_of(match["layer"])
        if match["part"] not in roles:
            continue
        if len(weight.shape) != (2 if match["kind"] == "weight" else 1):
            continue
        fresh = ExpertsLayer(match["layer"], in_turns=model_type in _IN_TURNS)
        layer = layers.setdefault(match["layer"], fresh)
        kept = layer.members if match["kind"] == "weight" else layer.biases
        kept.setdefault(roles[match["part"]], {})[int(match["expert"])] = weight
        layer.names.append(name)
    return {path: layer for path, layer in layers.items() if layer.members}


def assembled(
    tensors: Mapping[str, WeightRef], wanted: Mapping[str, Shape], model_type: object = None
) -> dict[str, WeightRef]:
    """Weights under the model's names: experts in one where the model has one parameter for them.

    Args:
        tensors: weights under the folder's names.
        wanted: names and shapes of the model's parameters.
        model_type: what the configuration calls the model.
    """
    found = {_renamed(name, wanted): weight for name, weight in tensors.items()}
    for layer in experts_layers(tensors, model_type).values():
        path = _renamed_path(layer.path)
        up: tuple[Role, ...] = ("gate", "up") if "gate" in layer.members else ("gate_up",)
        parts: dict[str, tuple[Role, ...]] = {
            f"{path}.gate_up_proj": up,
            f"{path}.up_proj": ("up",),
            f"{path}.down_proj": ("down",),
        }
        present = {name: roles for name, roles in parts.items() if name in wanted}
        if not present:
            continue
        biased = bool(layer.biases) and any(f"{name}_bias" in wanted for name in present)
        for name in layer.names:
            if biased or not name.endswith(".bias"):
                del found[_renamed(name, wanted)]
        for name, roles in present.items():
            found[name] = layer.stacked(name, roles, wanted[name][0])
            if biased:
                found[f"{name}_bias"] = layer.stacked_bias(f"{name}_bias", roles, wanted[name][0])
    return found


def experts_sites(
    tensors: Mapping[str, WeightRef], model_type: object = None
) -> dict[str, ExpertsSite]:
    """One site for each layer of quantized experts, by the folder's path."""
    sites: dict[str, ExpertsSite] = {}
    for path, layer in experts_layers(tensors, model_type).items():
        weights = [w for known in layer.members.values() for w in known.values()]
        if not any(is_quantized(weight.spec) for weight in weights):
            continue
        up, down = layer.stacked(f"{path}.up", _UP), layer.stacked(f"{path}.down", ("down",))
        sites[path] = ExpertsSite(path, experts_weight(path, up, down), bool(layer.biases))
    return sites


def _roles_of(layer: str) -> Mapping[str, Role]:
    """What the linears of an expert are called in a list of modules; nothing for other lists."""
    described = roles_at(layer)
    if described is not None:
        return described
    return _ROLES if layer.rpartition(".")[2] == _LIST else {}


def _gates_first(rows: int) -> torch.Tensor:
    """The stored row of each row, where gate and up are stored in turns.

    >>> _gates_first(6).tolist()
    [0, 2, 4, 1, 3, 5]
    """
    return torch.arange(rows).view(-1, 2).t().reshape(-1)


def _renamed(name: str, wanted: Mapping[str, Shape]) -> str:
    new = _renamed_path(name)
    return new if name not in wanted and new in wanted else name


def _renamed_path(name: str) -> str:
    for old, new in _RENAMED:
        name = name.replace(old, new)
    return name
