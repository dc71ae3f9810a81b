"""Quantized weights as GPTQ stores them.

Comes in: weights of a compiled model. Goes out: ``qweight``, ``qzeros``, ``scales``, ``g_idx`` for
each, and the settings that tell a reader how to take them.
Always holds: what is written decodes to the same float32 values bit for bit, for every reader that
takes the format at all; what cannot be written so is refused by name.

The first format, ``gptq``, stores zero points minus one. Where a zero point is 0 its readers
disagree (``qcompile.schemes.gptq.zeros``), so such weights are refused; with all others it is the
same whether one is added to each field, with or without dropping the carry, or to all fields of a
word at once. GPTQModel takes asymmetric weights of the first format only from itself: a file of
ours does not pass itself off as one of its own, so these are for other readers, and a warning says
so.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from qcompile.edge import find_route
from qcompile.errors import OptionError
from qcompile.layout import QuantizedTensor
from qcompile.schemes.gptq.layout import from_affine
from qcompile.schemes.words import pack_words, words_for
from qcompile.spec import AffineSpec
from qcompile.weight import WeightRef
from qcompile.writers.folder import Unit

Format = Literal["gptq", "gptq_v2"]
FORMATS = ("gptq", "gptq_v2")
BITS = (2, 3, 4, 8)
_ALIGN = 32  # in and out features of a module: what the shapes of other tools can express


@dataclass(frozen=True)
class Module:
    """A module to write.

    Attributes:
        path: its name in the checkpoint.
        weight: its weight.
        spec: what that is, as ``affine``.
    """

    path: str
    weight: WeightRef
    spec: AffineSpec

    @property
    def group(self) -> int:
        """Columns that share a scale, -1 for all."""
        return -1 if self.spec.group >= self.weight.shape[1] else self.spec.group


def module_of(path: str, weight: WeightRef) -> Module:
    """A module that can be written.

    Raises:
        OptionError: the format has no words for its weight.
    """
    route = find_route(weight.layout, weight.spec, "affine")
    exact = route is not None and route.error is None
    spec = route.spec if route is not None and exact else None
    if not isinstance(spec, AffineSpec) or spec.form == "offset":
        raise _unwritable(path, f"spec {weight.spec}", "codes with a scale and an integer zero")
    if spec.bits not in BITS:
        raise _unwritable(path, f"{spec.bits} bits", f"one of {', '.join(map(str, BITS))} bits")
    if len(weight.shape) != 2 or any(extent % _ALIGN for extent in weight.shape):
        shape = " x ".join(map(str, weight.shape))
        raise _unwritable(path, f"shape {shape}", f"a matrix of multiples of {_ALIGN}")
    return Module(path, weight, spec)


def unit_of(module: Module, format: Format) -> Unit:
    """The tensors of a module, made when they are written."""
    (n, k), spec = module.weight.shape, module.spec
    groups = -(-k // spec.group)
    words = words_for(k, spec.bits) * n + groups * words_for(n, spec.bits) + k
    return Unit(4 * words + 2 * groups * n, lambda: _tensors(module, format))


def _tensors(module: Module, format: Format) -> Mapping[str, torch.Tensor]:
    route = find_route(module.weight.layout, module.weight.spec, "affine")
    assert route is not None
    weight = route.apply(module.weight.load())
    module.weight.release()
    spec, (_, k) = module.spec, weight.shape
    words = from_affine(weight)
    stored = _zeros(module, weight) - int(format == "gptq")
    index = weight.parts.get("g_idx", torch.arange(k) // spec.group)
    return {
        f"{module.path}.qweight": words.parts["qweight"],
        f"{module.path}.qzeros": pack_words(stored.to(torch.uint8).t(), spec.bits, 1),
        f"{module.path}.scales": _scales(module, words.parts["scales"]),
        f"{module.path}.g_idx": index.to(torch.int32),
    }


def _zeros(module: Module, weight: QuantizedTensor) -> torch.Tensor:
    """Zero points int32 ``[N, G]``."""
    top = (1 << module.spec.bits) - 1
    if module.spec.form == "symmetric":
        return torch.full_like(
            weight.parts["scale"], 1 << (module.spec.bits - 1), dtype=torch.int32
        )
    zeros = weight.parts["zero"]
    if zeros.numel() and not 0 <= int(zeros.min()) <= int(zeros.max()) <= top:
        raise _unwritable(module.path, "zero points beyond its codes", f"0 to {top}")
    return zeros


def check_zeros(modules: Sequence[Module], format: Format) -> None:
    """Refuse zero points of 0 in the first format, and warn of who does not read the others.

    Raises:
        OptionError: names the first module whose zero points the format's readers disagree on.
    """
    asymmetric = [module for module in modules if module.spec.form == "zero"]
    if format != "gptq" or not asymmetric:
        return
    for module in asymmetric:
        route = find_route(module.weight.layout, module.weight.spec, "affine")
        assert route is not None
        zeros = route.apply(module.weight.load()).parts["zero"]
        module.weight.release()
        if bool((zeros == 0).any()):
            raise OptionError(
                module.path,
                f"{int((zeros == 0).sum())} zero points are 0, which format='gptq' stores as -1 "
                "and its readers take differently",
                "zero points of 1 and more",
                "pass format='gptq_v2', or quantize with sym=True",
            )
    warnings.warn(
        "format='gptq' with asymmetric weights: GPTQModel takes them only as format='gptq_v2'",
        stacklevel=3,
    )


def _scales(module: Module, scales: torch.Tensor) -> torch.Tensor:
    narrow = scales.to(torch.float16)
    if torch.equal(narrow.to(torch.float32), scales.to(torch.float32)):
        return narrow
    raise _unwritable(module.path, f"{scales.dtype} scales that float16 rounds", "float16 scales")


def settings_of(
    modules: Sequence[Module], format: Format, floats: Sequence[str], head: str | None, version: str
) -> dict[str, object]:
    """The settings of the quantization, as ``quantize_config.json`` has them.

    Args:
        modules: what is written.
        format: how zero points are stored.
        floats: linears that stay in float.
        head: module path of the output head.
        version: of this package.
    """
    kinds = Counter((m.spec.bits, m.group) for m in modules)
    bits, group = kinds.most_common(1)[0][0]
    dynamic: dict[str, dict[str, object]] = {
        f"-:^{re.escape(path)}$": {} for path in floats if path != head
    }
    for module in modules:
        if (module.spec.bits, module.group) != (bits, group):
            other = {"bits": module.spec.bits, "group_size": module.group}
            dynamic[f"+:^{re.escape(module.path)}$"] = dict(other)
    settings: dict[str, object] = {
        "bits": bits,
        "group_size": group,
        "sym": all(module.spec.form == "symmetric" for module in modules),
        "desc_act": any(module.spec.order != "sequential" for module in modules),
        "lm_head": any(module.path == head for module in modules),
        "method": "gptq",
        "quant_method": "gptq",
        "format": format,
        "checkpoint_format": format,
        "pack_dtype": "int32",
        "meta": {"quantizer": [f"qcompile:{version}"]},
    }
    return settings | ({"dynamic": dynamic} if dynamic else {})


def _unwritable(path: str, found: str, needed: str) -> OptionError:
    return OptionError(
        path,
        f"{found}: GPTQ's formats cannot store it",
        needed,
        "quantize the float model with scheme='rtn' or 'gptq'; a module that does not fit stays in "
        "float with skip=[...]",
    )
