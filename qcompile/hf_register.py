"""How transformers learns of qcompile.

Comes in: nothing. Goes out: ``qcompile.HFConfig``, and a transformers that knows it.
Always holds: a call without our settings goes the way it went before; registering twice changes
nothing more.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from transformers import modeling_utils
from transformers.quantizers.auto import register_quantization_config, register_quantizer

from qcompile.errors import OptionError
from qcompile.hf_config import METHOD, HFConfig
from qcompile.hf_quantizer import QCompileQuantizer, unread


def register() -> type[HFConfig]:
    """Make the method known to transformers. Returns the class of its settings.

    Raises:
        OptionError: this transformers chooses quantizers in another way.
    """
    known = getattr(modeling_utils, "get_hf_quantizer", None)
    names = inspect.signature(known).parameters if callable(known) else ()
    read = ("config", "quantization_config", "device_map", "gguf_file")
    if known is None or not all(name in names for name in read):
        import transformers

        raise OptionError(
            "qcompile.HFConfig",
            f"transformers {transformers.__version__} chooses quantizers in a way of its own",
            "transformers 5.24, or a later one that does it likewise",
            "install that version, or use qcompile.load and qcompile.optimize",
        )
    if not hasattr(known, "_qcompile"):
        register_quantization_config(METHOD)(HFConfig)
        register_quantizer(METHOD)(QCompileQuantizer)
        modeling_utils.get_hf_quantizer = _chooser(known)
    return HFConfig


def _chooser(original: Callable[..., Any]) -> Callable[..., Any]:
    """transformers' choice of a quantizer, ours where ``quantization_config`` is ours.

    The original refuses another class of settings than that of the checkpoint's own; for everything
    that is not ours it is called as it is.
    """

    @functools.wraps(original)
    def get_hf_quantizer(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        config, asked = given["config"], given.get("quantization_config")
        stored = getattr(config, "quantization_config", None)
        if isinstance(asked, Mapping) and asked.get("quant_method") == METHOD:
            asked = HFConfig.from_dict(asked)
        if not isinstance(asked, HFConfig):
            return original(*args, **kwargs)
        if given.get("gguf_file") is not None:
            raise unread("gguf_file", f"qcompile.load({str(given['gguf_file'])!r}, ...)")
        if getattr(config, "distributed_config", None) is not None:
            raise unread("distributed_config, tp_plan", "run one process, on one device")
        if isinstance(stored, Mapping) and stored.get("quant_method") == METHOD:
            asked = asked.over(stored)
        config.quantization_config = asked
        quantizer = QCompileQuantizer(asked, stored, pre_quantized=stored is not None)
        quantizer.validate_environment(device_map=given.get("device_map"))
        return quantizer, config, None

    get_hf_quantizer._qcompile = True  # type: ignore[attr-defined]
    return get_hf_quantizer
