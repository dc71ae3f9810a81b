"""qcompile: a compiler for quantized models in PyTorch.

Comes in: a quantized checkpoint or a module and a device. Goes out: a compiled module.
Always holds: importing this imports torch and nothing of a vendor.
"""

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

__version__ = "0.1.0"

__all__ = [
    "CaptureError",
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
