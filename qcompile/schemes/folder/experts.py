"""Experts that a folder stores one by one.

Comes in: weights by the folder's names. Goes out: one weight for each three-dimensional parameter
of the model, and one site a layer.
Always holds: every expert from 0 to E - 1 is there, or the first missing one is named; which rows
are gates is known by name, never by place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from qcompile.errors import SchemeError
from qcompile.experts_layout import experts_weight, stack_experts
from qcompile.layout import Shape
from qcompile.site import ExpertsSite
from qcompile.spec import Role, is_quantized
from qcompile.unify import unified
from qcompile.weight import WeightRef

_EXPERT = re.compile(
    r"(?P<layer>.+)\.(?P<expert>\d+)\.(?P<part>gate_proj|up_proj|gate_up_proj|down_proj|w[123])"
    r"\.weight"
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
# Modules that transformers calls otherwise than the tools' checkpoints do.
_RENAMED = ((".block_sparse_moe.", ".mlp."),)
_UP: tuple[Role, ...] = ("gate", "up", "gate_up")


@dataclass
class ExpertsLayer:
    """The experts of one layer.

    Attributes:
        path: the module, as the folder calls it.
        members: for each role the weight of every expert, by number.
        names: the folder's names of all of them.
    """

    path: str
    members: dict[Role, dict[int, WeightRef]] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)

    def stacked(self, name: str, roles: tuple[Role, ...], count: int | None = None) -> WeightRef:
        """The weights of some roles as one.

        Args:
            name: the name of the result.
            roles: those of them that the layer has.
            count: how many experts there have to be; as many as there are when None.

        Raises:
            SchemeError: an expert or a role is missing.
        """
        found = {role: self.members[role] for role in roles if role in self.members}
        number = count or 1 + max((max(known) for known in found.values()), default=0)
        for role in found or roles:
            for expert in range(number):
                if expert not in self.members.get(role, {}):
                    raise self._missing(role, expert, number)
        extra = [e for known in found.values() for e in known if e >= number]
        if extra:
            raise SchemeError(
                self._where,
                f"expert {extra[0]}",
                f"experts 0 to {number - 1}",
                "use the model that this checkpoint was made from",
            )
        stacks = {role: unified([known[e] for e in range(number)]) for role, known in found.items()}
        return stack_experts(name, stacks, self._where)

    @property
    def _where(self) -> str:
        first = next(iter(next(iter(self.members.values())).values()))
        return f"{first.source.rpartition(': ')[0]}: {self.path}"

    def _missing(self, role: Role, expert: int, count: int) -> SchemeError:
        return SchemeError(
            self._where,
            f"no {role} matrix of expert {expert}",
            f"one for each of the {count} experts",
            "download the checkpoint again",
        )


def experts_layers(tensors: Mapping[str, WeightRef]) -> dict[str, ExpertsLayer]:
    """The layers whose experts are stored one by one, by the folder's path."""
    layers: dict[str, ExpertsLayer] = {}
    for name, weight in tensors.items():
        match = _EXPERT.fullmatch(name)
        if match is None or len(weight.shape) != 2:
            continue
        layer = layers.setdefault(match["layer"], ExpertsLayer(match["layer"]))
        role = _ROLES[match["part"]]
        layer.members.setdefault(role, {})[int(match["expert"])] = weight
        layer.names.append(name)
    return layers


def assembled(
    tensors: Mapping[str, WeightRef], wanted: Mapping[str, Shape]
) -> dict[str, WeightRef]:
    """Weights under the model's names: experts in one where the model has one parameter for them.

    Args:
        tensors: weights under the folder's names.
        wanted: names and shapes of the model's parameters.
    """
    found = {_renamed(name, wanted): weight for name, weight in tensors.items()}
    for layer in experts_layers(tensors).values():
        path = _renamed_path(layer.path)
        parts = {
            f"{path}.gate_up_proj": ("gate", "up") if "gate" in layer.members else ("gate_up",),
            f"{path}.up_proj": ("up",),
            f"{path}.down_proj": ("down",),
        }
        present = {name: roles for name, roles in parts.items() if name in wanted}
        if not present:
            continue
        for name in layer.names:
            del found[_renamed(name, wanted)]
        for name, roles in present.items():
            found[name] = layer.stacked(name, roles, wanted[name][0])  # type: ignore[arg-type]
    return found


def experts_sites(tensors: Mapping[str, WeightRef]) -> dict[str, ExpertsSite]:
    """One site for each layer of quantized experts, by the folder's path."""
    sites: dict[str, ExpertsSite] = {}
    for path, layer in experts_layers(tensors).items():
        weights = [w for known in layer.members.values() for w in known.values()]
        if not any(is_quantized(weight.spec) for weight in weights):
            continue
        up, down = layer.stacked(f"{path}.up", _UP), layer.stacked(f"{path}.down", ("down",))
        sites[path] = ExpertsSite(path, experts_weight(path, up, down))
    return sites


def _renamed(name: str, wanted: Mapping[str, Shape]) -> str:
    new = _renamed_path(name)
    return new if name not in wanted and new in wanted else name


def _renamed_path(name: str) -> str:
    for old, new in _RENAMED:
        name = name.replace(old, new)
    return name
