"""qcompile: a compiler for quantized models in PyTorch.

Comes in: a quantized checkpoint or a module and a device. Goes out: a compiled module.
Always holds: importing this imports torch and nothing of a vendor.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from qcompile import frame_layouts as _frame_layouts  # noqa: F401 - registers its layouts
from qcompile.api import load, open, optimize, plan
from qcompile.errors import (
    CaptureError,
    LayoutError,
    LowerError,
    OptionError,
    PlanError,
    QCompileError,
    SchemeError,
    VerifyError,
)
from qcompile.register import register_experts
from qcompile.writers import save_checkpoint

if _TYPE_CHECKING:
    from qcompile.hf_config import HFConfig

__version__ = "0.1.0"

__all__ = [
    "CaptureError",
    "HFConfig",
    "LayoutError",
    "LowerError",
    "OptionError",
    "PlanError",
    "QCompileError",
    "SchemeError",
    "VerifyError",
    "load",
    "open",
    "optimize",
    "plan",
    "register_experts",
    "save_checkpoint",
]


def __getattr__(name: str) -> object:
    """``HFConfig``, which imports transformers and registers there when it is first used."""
    if name != "HFConfig":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from qcompile.hf import need_transformers

    need_transformers("qcompile.HFConfig")
    from qcompile.hf_register import register

    globals()[name] = register()
    return globals()[name]
