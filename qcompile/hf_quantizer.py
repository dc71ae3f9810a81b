"""qcompile as a quantization method of transformers.

Comes in: what ``from_pretrained`` hands to a quantizer. Goes out: a compiled model.
Always holds: of a quantized checkpoint transformers loads nothing, so that no weight is read twice
and no float copy of one is made; an argument of ``from_pretrained`` that would be passed over is an
error before weights are read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.quantizers.base import HfQuantizer

from qcompile import schemes
from qcompile.api import optimize
from qcompile.errors import OptionError, SchemeError
from qcompile.hf_config import METHOD, HFConfig
from qcompile.options import check_dtype
from qcompile.passes.select import require_kernels
from qcompile.prepare import backend_of, make_plan, narrow_dtype
from qcompile.quantizers.settings import QUANTIZERS
from qcompile.schemes import Checkpoint
from qcompile.schemes.folder.build import settle_head
from qcompile.schemes.folder.checkpoint import FolderCheckpoint
from qcompile.schemes.folder.settings import method_of, quantization


class QCompileQuantizer(HfQuantizer):  # type: ignore[misc]
    """What transformers calls while it builds and loads a model."""

    quantization_config: HFConfig

    def __init__(
        self, quantization_config: HFConfig, stored: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(quantization_config, **kwargs)
        self.stored = stored
        self.opened: Checkpoint | None = None
        self.dtype: torch.dtype | None = None

    def validate_environment(self, device_map: Any = None, **kwargs: Any) -> None:
        """Refuse places that the compiled model would not be at."""
        check_device_map(device_map, self.quantization_config)

    def update_device_map(self, device_map: Any) -> None:
        """Load on the CPU; ``optimize`` puts packed weights where they run."""

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of activations, and of the model that is built."""
        check_dtype(dtype)
        self.dtype = dtype
        return torch.float32 if self.quantization_config.emulate == "float32" else dtype

    def _process_model_before_weight_loading(
        self,
        model: Any,
        checkpoint_files: list[str] | None = None,
        use_kernels: bool = False,
        **kwargs: Any,
    ) -> None:
        if use_kernels:
            raise unread("use_kernels=True", "leave it out: the plan chooses the kernels")
        if getattr(model.config, "fusion_config", None) is not None:
            raise unread("fusion_config", "leave it out: the compiler fuses")
        with _usual_defaults():
            self._open(model, checkpoint_files)
        if self.opened is not None:
            _load_nothing(model)

    def _open(self, model: Any, checkpoint_files: list[str] | None) -> None:
        """Open a quantized checkpoint; make sure that one of floats is to be quantized."""
        folder = _folder(checkpoint_files)
        settings, config = quantization(folder), self.quantization_config
        if settings is None or method_of(settings) == METHOD:
            _check_floats(folder, config)
            self.pre_quantized = False  # transformers loads the floats
            _refuse_missing(model, folder)
            return
        if config.quantizes:
            raise OptionError(
                f"HFConfig(scheme={config.scheme!r}, ...)",
                f"{folder} is quantized already: {method_of(settings)}",
                "a checkpoint of floats",
                "leave scheme and the quantizer's options out",
            )
        opened = schemes.open_checkpoint(folder, config.scheme)
        _check_files(opened, checkpoint_files)
        self._require_kernels(opened)
        settle_head(model.config, opened.tensors, folder)
        self.opened, self.stored = opened, self.stored or dict(settings.values)

    def _require_kernels(self, opened: Checkpoint) -> None:
        """Refuse what the headers tell, before anything is loaded."""
        config = self.quantization_config
        target, backend = backend_of(config.device)
        dtype = self.dtype or torch.float32
        if config.emulate == "float32":
            dtype = narrow_dtype(dtype)
        policy, emitter, numerics = config.on_unsupported, config.emitter, config.numerics
        sites = opened.sites()
        require_kernels(
            make_plan(opened, sites, (), target, backend, policy, dtype, emitter, numerics)
        )

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> nn.Module:
        config = self.quantization_config
        how = config.arguments()
        if self.opened is None:
            dtype = self.dtype if config.emulate == "float32" else None
            made: nn.Module = optimize(model, config.scheme, dtype=dtype, **how, **config.quantizer)
            return made
        _load_again(model)
        model.tie_weights()  # transformers ties nothing of which it has loaded nothing
        # What the weights are stays the checkpoint's word.
        model.config.quantization_config = self.stored
        opened, self.opened = self.opened, None
        made = optimize(model, opened.scheme, checkpoint=opened, dtype=self.dtype, **how)
        return made

    def is_serializable(self) -> bool:
        """The model's own ``save_pretrained`` is replaced by ours."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Products on quantized weights have no gradients."""
        return False

    @property
    def is_compileable(self) -> bool:
        """``generate`` must not compile it once more."""
        return False


# **** what is refused ****


def unread(what: str, fix: str) -> OptionError:
    """That an argument of ``from_pretrained`` has no meaning here."""
    return OptionError(
        f"from_pretrained(..., {what})",
        "is not read together with qcompile.HFConfig",
        "arguments that mean something for a compiled model",
        fix,
    )


def check_device_map(device_map: Any, config: HFConfig) -> None:
    """Raise OptionError for a place that the compiled model would not be at."""
    kind = "cpu" if config.emulate else backend_of(config.device)[0].kind
    if device_map is None or device_map == "auto":
        return
    places = device_map.values() if isinstance(device_map, Mapping) else [device_map]
    if isinstance(device_map, Mapping) and list(device_map) == [""]:
        place = next(iter(places))
        if place == 0 and kind != "cpu":
            return
        if not isinstance(place, int) and str(place) in (kind, f"{kind}:0"):
            return
    told = sorted({str(place) for place in places})
    raise OptionError(
        "from_pretrained(..., device_map=...)",
        f"{', '.join(told)}, and HFConfig has device={config.device!r}",
        f'"auto", or the one device {kind!r}: a compiled model is on one device as a whole',
        "leave device_map out, and name the device in HFConfig(device=...)",
    )


def _folder(files: list[str] | None) -> Path:
    if not files:
        raise OptionError(
            "from_pretrained(..., state_dict=...)",
            "no files of a checkpoint",
            "a folder or a name on the Hub",
            "build the module and use qcompile.optimize",
        )
    return Path(files[0]).parent


def _check_files(opened: Checkpoint, files: list[str] | None) -> None:
    """Raise unless both sides read the same files."""
    if not isinstance(opened, FolderCheckpoint):
        return
    ours = {tensor.file.resolve() for tensor in opened.stored.values()}
    theirs = {Path(name).resolve() for name in files or ()}
    if not ours <= theirs:
        raise SchemeError(
            str(opened.path),
            f"transformers chose {', '.join(sorted(p.name for p in theirs))}, the scheme "
            f"{', '.join(sorted(p.name for p in ours))}",
            "one set of files of tensors",
            "leave variant and use_safetensors out, or keep one set in the folder",
        )


def _check_floats(folder: Path, config: HFConfig) -> None:
    if config.scheme in QUANTIZERS:
        return
    raise OptionError(
        f"HFConfig(scheme={config.scheme!r})",
        f"{folder} holds floats: its config.json has no quantization_config",
        "a quantized checkpoint, or a quantizer for this one",
        'HFConfig(scheme="rtn", bits=4) quantizes it while it is loaded',
    )


# **** a model that transformers must not fill ****


@contextlib.contextmanager
def _usual_defaults() -> Iterator[None]:
    """Tensors on the CPU and in float32, while transformers builds on the meta device."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)


def _load_nothing(model: Any) -> None:
    """Let transformers find no parameter to load, only buffers to compute."""
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)
    for parameter in model.parameters():
        parameter._is_hf_initialized = True
    for _, buffer in model.named_buffers():
        buffer._is_hf_initialized = True  # those outside the state are made anew all the same
    # On the object, for the time of loading: an empty state has nothing to load or to be missing.
    model.state_dict = dict
    model._keys_to_ignore_on_load_unexpected = {""}


def _refuse_missing(model: Any, folder: Path) -> None:
    """Raise SchemeError where transformers would go on with random values."""
    adjust = model._adjust_missing_and_unexpected_keys

    def checked(found: Any) -> None:
        del model._adjust_missing_and_unexpected_keys  # the class's own is back
        adjust(found)
        missing = sorted(found.missing_and_mismatched())
        if missing:
            raise SchemeError(
                str(folder),
                f"no values for {len(missing)} parameters: {', '.join(missing[:3])}"
                f"{', ...' if len(missing) > 3 else ''}",
                "a tensor of floats for each parameter",
                "use the class and the config.json that the checkpoint was made with; one that is "
                "quantized already needs its quantization_config",
            )

    model._adjust_missing_and_unexpected_keys = checked


def _load_again(model: Any) -> None:
    del model.state_dict, model._keys_to_ignore_on_load_unexpected
