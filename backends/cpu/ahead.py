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
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from qcompile.backends.cpu.build import load_library
from qcompile.backends.cpu.probe import find_compiler, variant
from qcompile.backends.cpu.shims import declarations, export_symbols
from qcompile.errors import ArtifactError, LowerError


def code_facts() -> dict[str, str]:
    """What code depends on; the name of the kernels has a digest of all that made them."""
    # Which kernels these are depends on the compiler, too.
    kernels = load_library().stem if find_compiler() else "none, for want of a C++ compiler"
    return {"torch": torch.__version__, "processor": variant(), "kernels": kernels}


def save_code(graph_module: fx.GraphModule, inputs: Sequence[torch.Tensor], path: Path) -> None:
    """Compile a graph to a file.

    Args:
        graph_module: a lowered graph; its tensors by ``get_attr`` are its constants.
        inputs: fake tensors, one for each placeholder; sizes may be symbols.
        path: the file to write, with the suffix ``.so``; where ops are called by their schemas,
            these are described in a ``.json`` beside it.

    Raises:
        LowerError: Inductor or the C++ compiler failed.
    """
    from torch._guards import TracingContext, detect_fake_mode, tracing
    from torch._subclasses.fake_tensor import FakeTensorMode

    export_symbols()
    mode = detect_fake_mode(list(inputs))
    assert isinstance(mode, FakeTensorMode)
    before, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True  # constants are real
    try:
        with tempfile.TemporaryDirectory() as folder, tracing(TracingContext(mode)):
            made = _compiled(graph_module, inputs, Path(folder, "code.so"))
            shutil.move(str(made), path)
            for calls in Path(folder).glob("*.wrapper.json"):  # of ops that have no C function
                shutil.move(calls, path.with_suffix(".json"))
    except (RuntimeError, OSError) as failure:
        raise LowerError(
            f"code for {path.name}",
            f"Inductor failed: {_first_line(failure)}",
            "a graph that Inductor compiles ahead of time, and a C++ compiler",
            "use qcompile.load for this model",
        ) from failure
    finally:
        mode.allow_non_fake_inputs = before


def _compiled(graph_module: fx.GraphModule, inputs: Sequence[torch.Tensor], path: Path) -> Any:
    """Where Inductor has put the library; it says so once it is done."""
    from torch._inductor.compile_fx import compile_fx_aot

    from qcompile.inductor_stamp import settings

    patches: dict[str, Any] = {
        **settings(),
        "aot_inductor.output_path": str(path),
        "aot_inductor.custom_ops_to_c_shims": declarations(),
        "aot_inductor.package_constants_in_so": False,
        # The code runs with the threads of the process that loads it, not with this one's.
        "cpp.dynamic_threads": True,
        # What several nodes read is kept from fewer operations on than Inductor would: every layer
        # would compute the attention's mask again.
        "realize_opcount_threshold": 8,
    }
    with warnings.catch_warnings():
        # Of torch, about what torch itself copies.
        warnings.filterwarnings("ignore", "`isinstance\\(treespec, LeafSpec\\)`", FutureWarning)
        return compile_fx_aot(graph_module, list(inputs), config_patches=patches)


def load_code(
    path: Path, constants: Mapping[str, torch.Tensor]
) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    """What ``save_code`` wrote, as a callable on real tensors.

    Args:
        path: the file. Its code is run: it must come from a place that is trusted.
        constants: tensors by the names of the graph's ``get_attr`` nodes; kept, not copied.

    Raises:
        ArtifactError: the file does not load, or wants other constants.
    """
    export_symbols()
    with tempfile.TemporaryDirectory() as folder:
        # A name of its own: the loader knows what it has by name, and would give the code that a
        # file of this name held before, where an artifact was replaced.
        link = Path(folder, "code.so")
        for suffix in (".so", ".json"):
            if path.with_suffix(suffix).exists():
                link.with_suffix(suffix).symlink_to(path.with_suffix(suffix).resolve())
        try:
            runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(link), 1)
        except RuntimeError as failure:
            raise _damaged(path, _first_line(failure)) from None
    wanted = set(runner.get_constant_names_to_original_fqns().values())
    missing = sorted(wanted - set(constants))
    if missing:
        raise _damaged(path, f"it wants the constant {missing[0]}, which is not there")
    runner.update_constant_buffer({n: constants[n] for n in wanted}, False, True, True)
    return runner.run


def _first_line(failure: Exception) -> str:
    return next(iter(str(failure).splitlines()), type(failure).__name__)


def _damaged(path: Path, found: str) -> ArtifactError:
    return ArtifactError(str(path), found, "code as it was exported", "export the model again")
