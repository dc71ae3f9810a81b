"""``quantization_config`` for ``from_pretrained``: how a model is to run.

Comes in: options of ``optimize`` by name, or what a ``config.json`` holds of them. Goes out: a
configuration that transformers carries to the quantizer.
Always holds: an option that nobody reads is an error; what the weights mean is said by the
checkpoint, never by this.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from qcompile import schemes
from qcompile.backends import default_dtype, kernels_for
from qcompile.emit import emitter_of
from qcompile.errors import OptionError, nearest
from qcompile.options import check_emulation, check_keep, check_policy
from qcompile.prepare import backend_of
from qcompile.quantizers.settings import QUANTIZERS, check_names, refuse_options, settings_for

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from qcompile.kernel import Numerics
    from qcompile.passes.select import Policy
    from qcompile.progress import Reporting
    from qcompile.quantizers.settings import Options
    from qcompile.session import Emulation

METHOD = "qcompile"
# Arguments of from_pretrained that some would look for here.
_ELSEWHERE = ("dtype", "torch_dtype", "device_map", "attn_implementation")
_PLAIN = ("device", "scheme", "emulate", "verify", "on_unsupported", "emitter", "numerics")


class HFConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """Run a model of ``from_pretrained`` through qcompile.

    Args:
        device: where it runs: ``cpu``, ``cuda``, ``npu``, optionally with an architecture.
        scheme: ``auto`` for a quantized checkpoint, or its scheme; ``rtn`` or ``gptq`` to quantize
            one of floats.
        emulate, verify, on_unsupported, emitter, keep, numerics, progress: as for
            ``qcompile.optimize``.
        quantizer: options of ``rtn`` and ``gptq``, for a checkpoint of floats.

    Raises:
        OptionError: an unknown name, or a value without meaning. ``dtype`` is an argument of
            ``from_pretrained``.
    """

    def __init__(
        self,
        device: str = "cpu",
        scheme: str = "auto",
        emulate: Emulation = False,
        verify: bool = False,
        *,
        on_unsupported: Policy = "error",
        emitter: str | None = None,
        keep: Iterable[str] = (),
        numerics: Numerics = "exact",
        progress: Reporting | None = None,
        **quantizer: Unpack[Options],
    ) -> None:
        _check_names(quantizer)
        check_emulation(emulate)
        check_policy(on_unsupported)
        target, backend = backend_of(device)
        kernels_for(backend, default_dtype(backend, target), numerics)  # refuses unknown numerics
        if emitter is not None:
            emitter_of(emitter)
        _check_scheme(scheme, quantizer)
        self.quant_method = METHOD
        self.device, self.scheme = device, scheme
        self.emulate, self.verify = emulate, verify
        self.on_unsupported, self.emitter, self.numerics = on_unsupported, emitter, numerics
        self.keep = check_keep(keep)
        self.progress = progress
        self.quantizer: dict[str, Any] = dict(quantizer)

    @property
    def quantizes(self) -> bool:
        """Whether this asks for floats to be quantized."""
        return bool(self.quantizer) or self.scheme == "rtn"

    def arguments(self) -> dict[str, Any]:
        """Those of ``optimize`` that do not say what to quantize."""
        names = ("device", "emulate", "verify", "on_unsupported", "emitter", "keep", "numerics")
        found = {name: getattr(self, name) for name in names}
        return found if self.progress is None else {**found, "progress": self.progress}

    def to_dict(self) -> dict[str, Any]:
        """What ``config.json`` can hold: everything but calibration data and callables."""
        plain = {name: getattr(self, name) for name in _PLAIN}
        quantizer = {k: v for k, v in self.quantizer.items() if k != "calibration"}
        if "skip" in quantizer:
            quantizer["skip"] = list(quantizer["skip"])
        return {"quant_method": METHOD, **plain, "keep": self.keep, **quantizer}

    @classmethod
    def from_dict(
        cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any
    ) -> Any:
        """The configuration that a ``config.json`` holds; keywords count more."""
        given = {**config_dict, **kwargs}
        method = given.pop("quant_method", METHOD)
        if method != METHOD:
            raise OptionError(
                "HFConfig.from_dict",
                f"quant_method {method!r}",
                f"settings of {METHOD}",
                "use the class of that method, or leave quant_method out",
            )
        made = cls(**given)
        return (made, {}) if return_unused_kwargs else made

    def over(self, stored: Mapping[str, Any]) -> HFConfig:
        """This, and what to quantize from a checkpoint that is configured for qcompile already."""
        if self.quantizes or self.scheme != "auto":
            return self
        said = HFConfig.from_dict(stored)
        return HFConfig(scheme=said.scheme, **self.arguments(), **said.quantizer)


def _check_names(given: Mapping[str, object]) -> None:
    for name in given:
        if name in _ELSEWHERE:
            raise OptionError(
                f"HFConfig({name}=...)",
                "an argument of from_pretrained",
                "options of qcompile",
                f"from_pretrained(..., {name}=..., quantization_config=qcompile.HFConfig(...))",
            )
        if name == "checkpoint":
            raise OptionError(
                "HFConfig(checkpoint=...)",
                "from_pretrained already names the checkpoint",
                "options of qcompile",
                "pass its folder or name to from_pretrained, or use qcompile.optimize",
            )
    check_names(given)


def _check_scheme(scheme: str, quantizer: Mapping[str, object]) -> None:
    known = (*QUANTIZERS, *schemes.names(), "auto")
    if scheme not in known:
        raise OptionError(
            f"scheme={scheme!r}",
            "unknown scheme",
            f"one of {', '.join(dict.fromkeys(known))}",
            f"name a known scheme{nearest(str(scheme), known)}",
        )
    if scheme in QUANTIZERS and (quantizer or scheme == "rtn"):
        settings_for(scheme, quantizer)
    elif scheme != "auto" or quantizer:
        refuse_options(quantizer, f"scheme={scheme!r}")
