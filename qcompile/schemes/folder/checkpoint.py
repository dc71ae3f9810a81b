"""An open checkpoint folder, whatever its scheme.

Comes in: the folder's tensors and the quantized weights that a scheme made of some of them. Goes
out: a ``Checkpoint``.
Always holds: every stored tensor is part of a quantized weight, is a float tensor of its own, or
is refused by name; names are the file's, with ``MODULE.weight`` for a quantized weight.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from qcompile.binding import bind
from qcompile.errors import SchemeError
from qcompile.layout import QuantizedTensor, Shape
from qcompile.schemes.folder.experts import assembled, experts_sites
from qcompile.schemes.folder.settings import Settings, model_config
from qcompile.schemes.folder.stored import StoredTensor
from qcompile.site import EmbeddingSite, LinearSite, Site
from qcompile.spec import FloatSpec, is_quantized
from qcompile.weight import Rows, WeightRef

# Dtypes in which tools store scales of integers.
SCALES = (torch.float16, torch.bfloat16, torch.float32)
# Last component of the path of a module that looks rows up, in the models of transformers.
_EMBEDDINGS = ("embed_tokens", "wte", "wpe", "word_embeddings", "embed_in", "tok_embeddings")
_NUMBER = re.compile(r"(\d+)")


@dataclass
class FolderCheckpoint:
    """An open checkpoint folder.

    Attributes:
        path: the folder.
        scheme: its scheme.
        settings: the settings of its quantization.
        stored: every stored tensor by name.
        quantized: the quantized weights by name.
        used: names of the stored tensors that belong to quantized weights.
        remarks: what the scheme has to say about the settings, for the plan.
    """

    path: Path
    scheme: str
    settings: Settings
    stored: Mapping[str, StoredTensor]
    quantized: Mapping[str, WeightRef]
    used: Collection[str]
    remarks: tuple[str, ...] = ()
    _dropped: list[str] = field(default_factory=list)

    @property
    def _model_type(self) -> object:
        return model_config(self.path).get("model_type")

    @cached_property
    def tensors(self) -> Mapping[str, WeightRef]:
        """Every weight under the folder's own names."""
        plain = {n: _float_weight(t) for n, t in self.stored.items() if n not in self.used}
        clash = next((name for name in plain if name in self.quantized), None)
        if clash is not None:
            raise SchemeError(
                plain[clash].source,
                "stored as floats and as a quantized weight",
                "one of the two",
                "convert the checkpoint again",
            )
        found = {**plain, **self.quantized}
        return {name: found[name] for name in sorted(found, key=_natural)}

    def dequantize(self, name: str) -> torch.Tensor:
        """A weight as float32 ``[N, K]``."""
        if name not in self.tensors:
            raise SchemeError(
                str(self.path),
                f"no weight {name!r}",
                "a name that the checkpoint lists",
                f"look at the names of its {len(self.tensors)} weights",
            )
        return self.tensors[name].dequantize()

    def facts(self) -> Mapping[str, object]:
        """The settings of the quantization and the model's configuration."""
        return {**self.settings.values, "config": model_config(self.path)}

    def notes(self) -> tuple[str, ...]:
        """What was read and does not matter."""
        dropped = (
            [f"left out, all zeros and without a parameter: {_few(self._dropped)}"]
            if self._dropped
            else []
        )
        quantized = sum(w.activations is not None for w in self.quantized.values())
        floats = (
            [f"{quantized} weights expect quantized activations; a kernel says whether it does so"]
            if quantized
            else []
        )
        return (*self.remarks, *floats, *dropped)

    def sites(self) -> list[Site]:
        """The sites of the quantized weights: lookups by the usual names, linears otherwise."""
        sites: list[Site] = []
        experts = experts_sites(self.tensors, self._model_type)
        for name, weight in self.tensors.items():
            if not is_quantized(weight.spec):
                continue
            module = name.removesuffix(".weight")
            layer = module.rpartition(".")[0].rpartition(".")[0]
            if layer in experts:
                if experts[layer] not in sites:
                    sites.append(experts[layer])
            elif is_embedding(module):
                sites.append(EmbeddingSite(module, weight))
            else:
                sites.append(LinearSite(module, weight, f"{module}.bias" in self.tensors))
        return sites

    def floats(self) -> list[WeightRef]:
        """The tensors stored as plain numbers."""
        return [w for w in self.tensors.values() if not is_quantized(w.spec)]

    def catalogue(
        self, parameters: Mapping[str, Shape], kept: Collection[str] = ()
    ) -> Mapping[str, WeightRef]:
        """Weights by the model's parameter names, each bound exactly once."""
        wanted = {name: shape for name, shape in parameters.items() if name not in kept}
        found = assembled(self.tensors, parameters, self._model_type)
        given = {name: weight for name, weight in found.items() if name not in kept}
        for name in list(given):
            if name not in wanted and self._means_nothing(name, wanted):
                del given[name]
                self._dropped.append(name)
        return bind(wanted, given, str(self.path))

    def buffers(self, names: Collection[str]) -> Mapping[str, WeightRef]:
        """Weights for those of some buffers, by the model's names, that the folder holds."""
        return {name: self.tensors[name] for name in names if name in self.tensors}

    def _means_nothing(self, name: str, wanted: Collection[str]) -> bool:
        """Whether a tensor without a parameter changes nothing.

        Some tools write a zero bias for linears that have none, and old files hold the frequencies
        of rotary embeddings, which the model computes itself.
        """
        if name.endswith(".rotary_emb.inv_freq"):
            return True
        weight = f"{name.removesuffix('.bias')}.weight"
        # An expert's weight is in the folder, and part of a parameter of the model.
        known = weight in wanted or weight in self.tensors
        if not name.endswith(".bias") or not known:
            return False
        return not self.tensors[name].dequantize().any()

    def build(self, dtype: torch.dtype) -> tuple[nn.Module, object]:
        """The Hugging Face model on the meta device and its tokenizer, None where there is none."""
        from qcompile.schemes.folder.build import build_model, build_tokenizer

        return build_model(self.path, self.tensors, dtype), build_tokenizer(self.path)


def is_embedding(module: str) -> bool:
    """Whether a module looks rows up, judged by the usual names."""
    return module.rpartition(".")[2] in _EMBEDDINGS


def _float_weight(stored: StoredTensor) -> WeightRef:
    # Counters and masks are buffers; every other kind of whole number belongs to some scheme.
    counts = stored.dtype in (torch.int64, torch.bool)
    if not counts and (not stored.dtype.is_floating_point or stored.dtype.itemsize == 1):
        raise SchemeError(
            stored.source,
            f"a tensor of {stored.dtype} that belongs to no quantized weight",
            "the tensors of its scheme, floats, and buffers of int64 or bool",
            "check that the settings of the quantization belong to these tensors",
        )

    def read(rows: Rows) -> QuantizedTensor:
        if not isinstance(rows, slice):
            data = stored.load().index_select(0, rows)
        elif stored.shape:
            start, stop, _ = rows.indices(stored.shape[0])
            data = stored.part(0, start, stop)
        else:
            data = stored.load()
        return QuantizedTensor(FloatSpec(stored.dtype), "float", tuple(data.shape), {"data": data})

    return WeightRef(
        stored.name,
        FloatSpec(stored.dtype),
        "float",
        stored.shape,
        read,
        stored.source,
        stored.release,
    )


def quantized_modules(
    stored: Mapping[str, StoredTensor],
    marks: Callable[[str, StoredTensor], bool],
    may_be_empty: Collection[str] = (),
) -> dict[str, dict[str, StoredTensor]]:
    """The tensors of every quantized module, by module and by last component of their names.

    Args:
        stored: the folder's tensors.
        marks: whether only a quantized module has a tensor with this last component.
        may_be_empty: last components of tensors that some tools write without elements; those are
            left out.

    Raises:
        SchemeError: another tensor has no elements.
    """
    modules: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        module, _, last = name.rpartition(".")
        if marks(last, tensor):
            modules[module] = {}
    for name, tensor in stored.items():
        module, _, last = name.rpartition(".")
        if module not in modules or (0 in tensor.shape and last in may_be_empty):
            continue
        if 0 in tensor.shape:
            raise SchemeError(
                tensor.source,
                f"no elements, shape {tensor.shape}",
                "the tensor's values",
                "download the checkpoint again",
            )
        modules[module][last] = tensor
    return {module: modules[module] for module in sorted(modules, key=_natural)}


Rule = TypeVar("Rule")


def ruled_modules(
    modules: Mapping[str, dict[str, StoredTensor]], rule_of: Callable[[str], Rule | None]
) -> Iterator[tuple[str, dict[str, StoredTensor], Rule]]:
    """Quantized modules with their tensors and their rules.

    Raises:
        SchemeError: the settings have no rule for a module that is quantized.
    """
    for module, tensors in modules.items():
        rule = rule_of(module)
        if rule is None:
            raise SchemeError(
                next(iter(tensors.values())).source,
                "quantized, though the settings exclude this module or name none like it",
                "a rule for every quantized module, floats for all others",
                "correct the settings of the quantization",
            )
        yield module, tensors, rule


def need_tensor(
    tensors: Mapping[str, StoredTensor],
    name: str,
    module: str,
    dtypes: Collection[torch.dtype],
    dimensions: Collection[int] = (2,),
) -> StoredTensor:
    """A tensor of a module, after checking that it is there and of a kind that can be read.

    Raises:
        SchemeError: it is missing, or of another dtype or number of dimensions.
    """
    found = tensors.get(name)
    if found is None:
        some = next(iter(tensors.values()))
        raise SchemeError(
            f"{some.file}: {module}",
            f"{some.name.rpartition('.')[2]} without {name}",
            f"the tensor {module}.{name}",
            "check the settings of the quantization, or download the checkpoint again",
        )
    if found.dtype not in dtypes or len(found.shape) not in dimensions:
        counts = " or ".join(map(str, dimensions))
        raise SchemeError(
            found.source,
            f"{found.dtype}, shape {found.shape}",
            f"{' or '.join(map(str, dtypes))} with {counts} dimensions",
            "check the settings of the quantization against the tensors",
        )
    return found


def _natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts layer 2 before layer 10."""
    return [(int(p), "") if p.isdigit() else (-1, p) for p in _NUMBER.split(name)]


def _few(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    return ", ".join(listed[:3]) + more
