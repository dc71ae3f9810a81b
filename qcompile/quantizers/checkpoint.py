"""A float model as a checkpoint: quantized in place, weight by weight.

Comes in: a model and its chosen linears. Goes out: an object that answers to
``qcompile.schemes.Checkpoint``.
Always holds: specs, layouts and shapes are known before anything is quantized, so a plan can be
made first; codes lie packed, in the layout ``gptq``; a float weight is released as soon as its
quantized form is stored and nobody needs its values.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from qcompile.errors import LayoutError, OptionError
from qcompile.experts_layout import stack_experts
from qcompile.layout import QuantizedTensor, Shape
from qcompile.modules import module_sites, release
from qcompile.quantizers.expert_matrices import FloatExperts
from qcompile.quantizers.linears import FloatLinear, Part, left_in_float
from qcompile.quantizers.settings import Settings
from qcompile.schemes.gptq.layout import NAME, from_affine
from qcompile.site import Site
from qcompile.spec import FloatSpec
from qcompile.weight import Rows, WeightRef

_SHOWN = 8


@dataclass
class InPlace:
    """A float model that is being quantized.

    Attributes:
        model: the model; its parameters that are not quantized stay in it.
        settings: how.
        linears: what.
        experts: what, of modules that hold the matrices of several experts.
        losses: relative squared error of every linear's output on the calibration data.
        unreached: linears that no calibration data reached.
        few: linears that got fewer calibration inputs than they have columns, and how many.
    """

    model: nn.Module
    settings: Settings
    linears: tuple[FloatLinear, ...]
    experts: tuple[FloatExperts, ...] = ()
    losses: dict[str, float] = field(default_factory=dict)
    unreached: list[str] = field(default_factory=list)
    few: dict[str, int] = field(default_factory=dict)
    _stored: dict[str, QuantizedTensor] = field(default_factory=dict)
    _refs: dict[str, WeightRef] = field(default_factory=dict)
    _left: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Describe every weight before it exists."""
        for linear in self.linears:
            shape = (linear.weight.shape[0], linear.weight.shape[1])
            self._refs[linear.name] = self._ref(linear.name, shape)
        for experts in self.experts:
            members = [self._ref(experts.member(e), experts.shape) for e in range(experts.count)]
            roles = {experts.role: members}
            self._refs[experts.name] = stack_experts(experts.name, roles, str(self.path))
        self._left = left_in_float(self.model, self._refs)

    @property
    def scheme(self) -> str:
        """Name of the quantizer."""
        return self.settings.method

    @property
    def path(self) -> Path:
        """The class of the model, for messages: there is no file."""
        return Path(type(self.model).__name__)

    @property
    def tensors(self) -> Mapping[str, WeightRef]:
        """The quantized weights."""
        return self._refs

    def dequantize(self, name: str) -> torch.Tensor:
        """A quantized weight as float32 ``[N, K]``."""
        return self._refs[name].dequantize()

    def facts(self) -> Mapping[str, object]:
        """The settings and, with calibration, the losses."""
        return {"settings": self.settings, "losses": self.losses}

    def notes(self) -> tuple[str, ...]:
        """What was left in float, what was only rounded, and what it cost."""
        notes = []
        if self._left:
            notes.append(f"left in float: {', '.join(self._left)}")
        if self.settings.method == "gptq" and not self.settings.batches:
            notes.append("no calibration data: gptq rounds to nearest")
        if self.unreached:
            listed = _first(self.unreached)
            notes.append(f"rounded to nearest, no calibration data reached {listed}")
        if self.few:
            notes.append(
                f"{len(self.few)} linears got fewer calibration inputs than they have columns, at "
                f"least {min(self.few.values())}: more data would serve them better"
            )
        if self.losses:
            worst = max(self.losses, key=self.losses.__getitem__)
            mean = sum(self.losses.values()) / len(self.losses)
            notes.append(
                f"relative squared error on the calibration data: mean {mean:.2e},"
                f" worst {self.losses[worst]:.2e} at {worst}"
            )
        return tuple(notes)

    def sites(self) -> list[Site]:
        """The sites of the model."""
        return module_sites(self.model, self._refs)

    def floats(self) -> list[WeightRef]:
        """The parameters that stay in float; they are where the module has them."""
        return [
            _float_ref(name, parameter)
            for name, parameter in self.model.named_parameters()
            if name not in self._refs
        ]

    def catalogue(
        self, parameters: Mapping[str, Shape], kept: Collection[str] = ()
    ) -> Mapping[str, WeightRef]:
        """The quantized weights: all other parameters stay as the module has them."""
        return dict(self._refs)

    def build(self, dtype: torch.dtype) -> tuple[nn.Module, object]:
        """There is no file to build a model from."""
        raise OptionError(
            str(self.path), "is a model already", "a checkpoint on disk", "use the model itself"
        )

    # **** filling it ****

    def store(self, name: str, weight: QuantizedTensor) -> None:
        """Keep the quantized form of a matrix (layout ``affine``), a linear's or an expert's."""
        packed = from_affine(weight)
        packed.check(name)
        self._stored[name] = packed

    def stored(self, name: str) -> torch.Tensor:
        """The values of a matrix that was stored, float32 ``[N, K]``."""
        return self._stored[name].dequantize()

    def release(self, part: Part) -> None:
        """Give up the float values; reading them raises from now on."""
        if isinstance(part, FloatExperts):
            release(part.modules, part.key)
        else:
            release(part.modules)

    def _ref(self, name: str, shape: tuple[int, int]) -> WeightRef:
        # Not ``self``: a compiled model keeps the reference, which must not keep the model.
        stored = self._stored

        def read(rows: Rows) -> QuantizedTensor:
            return stored[name].take_rows(rows)

        source = f"{self.path}: {name}"
        return WeightRef(name, self.settings.spec(shape[1]), NAME, shape, read, source)


def _float_ref(name: str, parameter: nn.Parameter) -> WeightRef:
    spec, shape = FloatSpec(parameter.dtype), tuple(parameter.shape)
    held = weakref.ref(parameter)  # plans list this; they must not keep replaced parameters

    def read(rows: Rows) -> QuantizedTensor:
        alive = held()
        if alive is None:
            raise LayoutError(name, "was replaced", "the module's own parameter", "read it there")
        data = alive.detach()[rows]
        return QuantizedTensor(spec, "float", tuple(data.shape), {"data": data})

    return WeightRef(name, spec, "float", shape, read, f"module: {name}")


def _first(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
