"""From the tensors of a file to the parameters of its model.

Comes in: an open file, and a module's parameter names where there is a module. Goes out: weights
by parameter name, with what the converter changed undone; the sites of the model.
Always holds: nothing of a weight is read, transformers is not imported; a tensor that no parameter
uses is an error unless its architecture lists it.

The head: a file without ``output.weight`` ties it to the embedding; a file with one has a head of
its own, even where the model's family usually ties.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from qcompile.binding import bind
from qcompile.errors import SchemeError
from qcompile.layout import Shape
from qcompile.schemes.gguf.architectures import KNOWN
from qcompile.schemes.gguf.entries import (
    EMBEDDING,
    GLOBAL,
    HELPERS,
    IGNORED_IN_LAYER,
    OUTPUT,
    Stem,
)
from qcompile.schemes.gguf.experts import experts_names, experts_parameters, experts_site
from qcompile.schemes.gguf.latent import KEYS, VALUES, WHOLE, joined
from qcompile.schemes.gguf.reader import GGUFFile
from qcompile.schemes.gguf.transforms import applies
from qcompile.schemes.gguf.values import Configuration, read_configuration
from qcompile.site import EmbeddingSite, LinearSite, Site
from qcompile.spec import is_quantized
from qcompile.weight import WeightRef

_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")
_HEAD, _TIED_TO = f"{OUTPUT.module}.weight", f"{EMBEDDING.module}.weight"


def catalogue(
    file: GGUFFile, parameters: Mapping[str, Shape], kept: Collection[str] = ()
) -> dict[str, WeightRef]:
    """Weights by parameter name.

    A module whose parameter names are the file's own tensor names is bound verbatim, rows as
    stored, whatever the architecture; otherwise the architecture's names and transforms apply.

    Args:
        file: an open file.
        parameters: names and shapes of all parameters of the model, a tied one under each name.
        kept: parameters that need no tensor and ignore the one they may have.

    Returns:
        weights by parameter name; a tied head is left out, its other name carries the weight.

    Raises:
        SchemeError: an unknown architecture, a parameter without a tensor, a tensor without a
            parameter, or a shape that differs.
    """
    where = str(file.path)
    wanted = {name: shape for name, shape in parameters.items() if name not in kept}
    # A file of an unknown architecture can only be meant by its own names; then what is missing is
    # told as missing. One name in common is enough to tell.
    foreign = file.metadata.get("general.architecture") not in KNOWN
    named = [name in file.tensors for name in wanted]
    if named and (all(named) or (foreign and any(named))):
        weights = {name: file.weight(name) for name in file.tensors if name not in kept}
        return bind(wanted, weights, where)
    configuration = read_configuration(file)
    aliases = {_HEAD: _TIED_TO} if _tied(configuration) else {}
    weights = _renamed(file, configuration)
    return bind(wanted, {n: w for n, w in weights.items() if n not in kept}, where, aliases)


def buffers(file: GGUFFile, names: Collection[str]) -> dict[str, WeightRef]:
    """Weights for those of some buffers that a file holds, by the model's names or the file's."""
    found = {name: file.weight(name) for name in names if name in file.tensors}
    if file.metadata.get("general.architecture") in KNOWN:
        weights = _renamed(file, read_configuration(file))
        found |= {name: weights[name] for name in names if name in weights}
    return found


def model_weights(
    file: GGUFFile, configuration: Configuration | None = None
) -> dict[str, WeightRef]:
    """Weights by parameter name, from headers alone.

    Raises:
        SchemeError: as for ``catalogue``.
    """
    known = configuration or read_configuration(file)
    return bind(_expected(known), _renamed(file, known), str(file.path))


def model_sites(file: GGUFFile) -> list[Site]:
    """The sites of the model that use quantized weights, from headers alone.

    A tied head is a site of its own that shares the embedding's weight.

    Raises:
        SchemeError: as for ``catalogue``.
    """
    configuration = read_configuration(file)
    weights = model_weights(file, configuration)
    sites: list[Site] = []
    for module, stem in _modules(configuration):
        if stem is None:
            assert configuration.architecture.mixture is not None
            experts = experts_site(module, configuration.architecture.mixture, weights)
            sites += [] if experts is None else [experts]
            continue
        weight = weights.get(f"{module}.weight")
        if weight is None or stem.kind == "norm" or not is_quantized(weight.spec):
            continue
        if stem.kind == "embedding":
            sites.append(EmbeddingSite(module, weight))
        else:
            sites.append(LinearSite(module, weight, f"{module}.bias" in weights))
    embedding = weights[_TIED_TO]
    if _tied(configuration) and is_quantized(embedding.spec):
        sites.append(LinearSite(OUTPUT.module, embedding))
    return sites


def _modules(configuration: Configuration) -> list[tuple[str, Stem | None]]:
    """Every module with weights and its path, in the model's order; None stands for experts."""
    layers = configuration.values["num_hidden_layers"]
    assert isinstance(layers, int)
    mixture = configuration.architecture.mixture
    inner: list[tuple[str, Stem | None]] = []
    for n in range(layers):
        prefix = f"model.layers.{n}"
        inner += [(f"{prefix}.{stem.module}", stem) for stem in _stems(configuration, n)]
        if mixture is not None and not _is_dense(configuration, n):
            inner.append((f"{prefix}.{mixture.module}", None))
    first, *last = GLOBAL
    return [(first.module, first), *inner, *((stem.module, stem) for stem in last)]


def _stems(configuration: Configuration, layer: int) -> list[Stem]:
    """The modules of a layer, without its experts."""
    architecture, values = configuration.architecture, configuration.values
    stems = architecture.layer
    if architecture.mixture is not None:
        mixture = architecture.mixture
        stems += mixture.dense if _is_dense(configuration, layer) else mixture.stems
    return [
        stem
        for stem in stems
        if (stem.needs is None or values[stem.needs] is not None)
        and (stem.lacks is None or values[stem.lacks] is None)
    ]


def _is_dense(configuration: Configuration, layer: int) -> bool:
    """Whether a layer has no experts."""
    mixture = configuration.architecture.mixture
    if mixture is None or mixture.leading is None:
        return mixture is None
    leading = configuration.values[mixture.leading]
    assert isinstance(leading, int)
    return layer < leading


def _expected(configuration: Configuration) -> dict[str, None]:
    """Names of the parameters of the Hugging Face model of this configuration."""
    mixture = configuration.architecture.mixture
    names: dict[str, None] = {}
    for module, stem in _modules(configuration):
        if stem is None:
            assert mixture is not None
            names |= dict.fromkeys(experts_names(module, mixture))
        elif stem is OUTPUT and _tied(configuration):
            continue
        elif stem.part is not None:
            names[module] = None
        else:
            names[f"{module}.weight"] = None
            if stem.bias == "always" or configuration.values.get(stem.bias or ""):
                names[f"{module}.bias"] = None
    return names


def _renamed(file: GGUFFile, configuration: Configuration) -> dict[str, WeightRef]:
    """Every tensor under its parameter's name, or under its own where it has no parameter."""
    architecture = configuration.architecture
    outer = {stem.tensor: stem for stem in GLOBAL}
    weights, used = experts_parameters(file, configuration)
    if architecture.latent:
        used |= _add_latent(weights, file, configuration)
    for name in file.tensors:
        match = _NAME.fullmatch(name)
        number, tensor, part = match.groups() if match else (None, "", "")
        ignored = name in HELPERS[architecture.rope] or (number and tensor in IGNORED_IN_LAYER)
        if ignored or name in used:
            continue
        inner = _stems(configuration, int(number)) if number else []
        known = {stem.tensor: stem for stem in inner} if number else outer
        stem, weight = known.get(tensor), file.weight(name)
        if stem is None or stem.part not in (None, part):
            weights[name] = weight
            continue
        for transform in architecture.transforms:
            if applies(transform, tensor):
                weight = transform.undo(weight, configuration.values)
        prefix = f"model.layers.{int(number)}." if number else ""
        ending = "" if stem.part else f".{part}"
        _add(weights, weight.renamed(f"{prefix}{stem.module}{ending}"))
    return weights


def _add_latent(
    weights: dict[str, WeightRef], file: GGUFFile, configuration: Configuration
) -> set[str]:
    """Add the matrices that files hold in two halves; the names of the halves.

    A file that holds the whole matrix too is read by the whole.
    """
    used: set[str] = set()
    for name in file.tensors:
        match = _NAME.fullmatch(name)
        if match is None or match[2] != KEYS:
            continue
        prefix = f"blk.{match[1]}"
        halves = f"{prefix}.{KEYS}.weight", f"{prefix}.{VALUES}.weight"
        if halves[1] not in file.tensors:
            continue
        used |= set(halves)
        if f"{prefix}.{WHOLE}.weight" not in file.tensors:
            target = f"model.layers.{int(match[1])}.self_attn.kv_b_proj.weight"
            keys, values = (file.weight(half) for half in halves)
            weights[target] = joined(target, keys, values, configuration.values)
    return used


def _add(weights: dict[str, WeightRef], weight: WeightRef) -> None:
    if weight.name in weights:
        raise SchemeError(
            weight.source,
            f"a second tensor for {weight.name}; the first is {weights[weight.name].source}",
            "one tensor for each parameter",
            "convert the file again",
        )
    weights[weight.name] = weight


def _tied(configuration: Configuration) -> bool:
    return configuration.values["tie_word_embeddings"] is True
