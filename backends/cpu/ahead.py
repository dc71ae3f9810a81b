"""Graphs compiled to files that run without a compiler of graphs.

Comes in: a lowered graph. Goes out: a shared library, and later a callable from it.
Always holds: constants are not in the library, which may be shared; a library runs with the native
kernels that it was compiled for, or not at all.

Inductor's ahead-of-time mode writes one C++ function for the whole graph, which calls the native
ops by ``csrc/shims.cpp``. Loading one takes torch, not its compilers.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from qcompile.backends.cpu.build import load_library
from qcompile.backends.cpu.probe import variant
from qcompile.backends.cpu.shims import declarations, export_symbols
from qcompile.errors import LowerError


def code_facts() -> dict[str, str]:
    """What code depends on; the name of the kernels has a digest of all that made them."""
    return {
        "torch": torch.__version__,
        "processor": variant(),
        "kernels": load_library().stem,
    }


def save_code(graph_module: fx.GraphModule, inputs: Sequence[torch.Tensor], path: Path) -> None:
    """Compile a graph to a file.

    Args:
        graph_module: a lowered graph; its tensors by ``get_attr`` are its constants.
        inputs: fake tensors, one for each placeholder; sizes may be symbols.
        path: the file to write.

    Raises:
        LowerError: Inductor or the C++ compiler failed.
    """
    from torch._guards import TracingContext, detect_fake_mode, tracing
    from torch._inductor.compile_fx import compile_fx_aot
    from torch._subclasses.fake_tensor import FakeTensorMode

    from qcompile.inductor_stamp import settings

    export_symbols()
    mode = detect_fake_mode(list(inputs))
    assert isinstance(mode, FakeTensorMode)
    before, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True  # constants are real
    try:
        with tempfile.TemporaryDirectory() as folder, tracing(TracingContext(mode)):
            patches: dict[str, Any] = {
                **settings(),
                "aot_inductor.output_path": str(Path(folder, "code.so")),
                "aot_inductor.custom_ops_to_c_shims": declarations(),
                "aot_inductor.package_constants_in_so": False,
                # The code runs with the threads of the process that loads it, not with this one's.
                "cpp.dynamic_threads": True,
                # What several nodes read is kept from fewer operations on than Inductor would:
                # every layer would compute the attention's mask again.
                "realize_opcount_threshold": 8,
            }
            made = compile_fx_aot(graph_module, list(inputs), config_patches=patches)
            shutil.move(str(made), path)
    except (RuntimeError, OSError) as failure:
        raise LowerError(
            f"code for {path.name}",
            f"Inductor failed: {str(failure).splitlines()[0]}",
            "a graph that Inductor compiles ahead of time, and a C++ compiler",
            "use qcompile.load for this model",
        ) from failure
    finally:
        mode.allow_non_fake_inputs = before


def load_code(
    path: Path, constants: Mapping[str, torch.Tensor]
) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    """What ``save_code`` wrote, as a callable on real tensors.

    Args:
        path: the file. Its code is run: it must come from a place that is trusted.
        constants: tensors by the names of the graph's ``get_attr`` nodes; kept, not copied.

    Raises:
        LowerError: the file does not load, or wants other constants.
    """
    export_symbols()
    try:
        runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(path), 1)
    except RuntimeError as failure:
        raise _damaged(path, str(failure).splitlines()[0]) from None
    wanted = set(runner.get_constant_names_to_original_fqns().values())
    missing = sorted(wanted - set(constants))
    if missing:
        raise _damaged(path, f"it wants the constant {missing[0]}, which is not there")
    runner.update_constant_buffer({n: constants[n] for n in wanted}, False, True, True)
    return runner.run


def _damaged(path: Path, found: str) -> LowerError:
    return LowerError(str(path), found, "code as it was exported", "export the model again")
