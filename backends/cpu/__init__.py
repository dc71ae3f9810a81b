"""The CPU backend: native kernels where a compiler is found, torch's own operators otherwise.

Comes in: sites. Goes out: native kernels over panels; aten's int4 product, for bfloat16
activations; decoding in torch; the reference.
Always holds: importing it compiles nothing and reads nothing of the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from qcompile.backends.cpu import blocks as _blocks  # noqa: F401 - registers edges
from qcompile.backends.cpu import decoded as _decoded
from qcompile.backends.cpu import edges as _edges  # noqa: F401 - registers edges
from qcompile.backends.cpu import experts as _experts
from qcompile.backends.cpu import linear as _linear
from qcompile.backends.cpu import panel as _panel  # noqa: F401 - registers the layout
from qcompile.backends.cpu import words as _words  # noqa: F401 - registers edges
from qcompile.backends.cpu.ahead import code_facts as code_facts
from qcompile.backends.cpu.ahead import load_code as load_code
from qcompile.backends.cpu.ahead import save_code as save_code
from qcompile.backends.cpu.aten_embedding import AtenEmbedding
from qcompile.backends.cpu.aten_int4 import ATEN_INT4
from qcompile.backends.cpu.aten_linear import AtenLinear
from qcompile.backends.cpu.attention import NativeAttention
from qcompile.backends.cpu.build import load_library
from qcompile.backends.cpu.embedding import PanelEmbedding
from qcompile.backends.cpu.gated import GateProducts
from qcompile.backends.cpu.probe import find_compiler, host_arch
from qcompile.backends.cpu.siblings import JoinSiblings
from qcompile.backends.reference import KERNELS as _REFERENCE
from qcompile.emit import register_emitter
from qcompile.kernel import Kernel, Numerics
from qcompile.target import Target

if TYPE_CHECKING:
    from qcompile.passes import Pass

KERNELS: tuple[Kernel, ...] = (
    *(_linear.EXACT, PanelEmbedding(), _experts.EXACT),
    *(AtenLinear(), AtenEmbedding()),
    *_decoded.KERNELS,
    *_REFERENCE,
)
FAST_KERNELS: tuple[Kernel, ...] = (_linear.FAST, _experts.FAST)


def kernels(dtype: torch.dtype) -> tuple[Kernel, ...]:
    """The kernels for activations of a dtype: aten's int4 product is fast for bfloat16 alone."""
    narrow = dtype == torch.bfloat16
    return tuple(kernel for kernel in KERNELS if narrow or kernel.layout != ATEN_INT4.name)


def default_target() -> Target:
    """This machine."""
    return Target("cpu", host_arch())


def default_dtype(target: Target) -> torch.dtype:
    """What every kernel takes."""
    return torch.float32


def compiler() -> str:
    """Inductor, which on a CPU needs a C++ compiler just as the kernels do."""
    return "chain" if find_compiler() else "eager"


def _chain(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    # Imported here: splitting graphs takes modules that a plan does not need.
    from qcompile.backends.cpu.chain import emit

    return emit(graph_module, inputs)


register_emitter("chain", _chain)


def prepare() -> None:
    """Build and load the native kernels, unless there is no compiler."""
    if find_compiler():
        load_library()


def passes(numerics: Numerics) -> tuple[Pass, ...]:
    """Gated layers, joined products and native attention, where there are native kernels."""
    return (GateProducts(), JoinSiblings(), NativeAttention()) if find_compiler() else ()
