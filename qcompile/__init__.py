"""qcompile: a compiler for quantized models in PyTorch.

Comes in: a quantized checkpoint or a module and a device. Goes out: a compiled module.
Always holds: importing this imports torch and nothing of a vendor.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

from qcompile import frame_layouts as _frame_layouts  # noqa: F401 - registers its layouts
from qcompile.api import load, open, optimize, plan
from qcompile.errors import (
    ArtifactError,
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
    from qcompile.artifact import Artifact, open_artifact
    from qcompile.exporting import export
    from qcompile.hf_config import HFConfig

__version__ = "0.1.0"

__all__ = [
    "Artifact",
    "ArtifactError",
    "CaptureError",
    "HFConfig",
    "LayoutError",
    "LowerError",
    "OptionError",
    "PlanError",
    "QCompileError",
    "SchemeError",
    "VerifyError",
    "export",
    "load",
    "open",
    "open_artifact",
    "optimize",
    "plan",
    "register_experts",
    "save_checkpoint",
]


# What few programs need is imported when it is first used.
_LATER = {
    "Artifact": "qcompile.artifact",
    "open_artifact": "qcompile.artifact",
    "export": "qcompile.exporting",
}


def __getattr__(name: str) -> object:
    """What is imported on first use; ``HFConfig`` also registers with transformers."""
    if name in _LATER:
        globals()[name] = getattr(_import_module(_LATER[name]), name)
        return globals()[name]
    if name != "HFConfig":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from qcompile.hf import need_transformers

    need_transformers("qcompile.HFConfig")
    from qcompile.hf_register import register

    globals()[name] = register()
    return globals()[name]
