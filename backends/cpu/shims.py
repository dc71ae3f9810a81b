"""C declarations of the native ops, for Inductor's C++ code.

Comes in: nothing. Goes out: what Inductor writes above a call, for every op of ``csrc/shims.cpp``.
Always holds: a declaration here is the definition there. An op without one would be looked up by
name at every call, which takes longer than a small product.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from qcompile.backends.cpu.build import load_library

_ONE = "AtenTensorHandle {0}"
_MAYBE = "const AtenTensorHandle* {0}"
_SEVERAL = "const AtenTensorHandle* {0}, int64_t {0}_len"
_MAYBES = "const AtenTensorHandle** {0}, int64_t {0}_len"
_NUMBERS = "const int64_t* {0}, int64_t {0}_len"
# By the types of the ops' schemas, as Inductor passes them.
_TYPES = {
    "Tensor": _ONE,
    "Optional[Tensor]": _MAYBE,
    "List[Tensor]": _SEVERAL,
    "List[Optional[Tensor]]": _MAYBES,
    "List[int]": _NUMBERS,
    "int": "int64_t {0}",
    "float": "double {0}",
    "bool": "int32_t {0}",
    "str": "const char* {0}",
    "ScalarType": "int32_t {0}",
}
_NAMES = (
    *("panel_linear", "panel_linears", "panel_gated"),
    *("panel_embedding", "panel_experts", "attention"),
)


class _Declarations(dict[Any, list[str]]):
    """Known to Inductor's cache by name: ops themselves cannot be part of its key.

    What they say is part of the key all the same: ``inductor_stamp`` reads this file.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return declarations, ()


def declarations() -> dict[Any, list[str]]:
    """The C declaration of every op that has one, in the form Inductor's setting takes."""
    found = _Declarations()
    for name in _NAMES:
        op = getattr(torch.ops.qcompile_cpu, name).default
        found[op] = [_declaration(name, op._schema)]
    return found


def _declaration(name: str, schema: Any) -> str:
    parts = [_TYPES[str(part.real_type)].format(part.name) for part in schema.arguments]
    several = str(schema.returns[0].type) == "List[Tensor]"
    # A list of results is one place for each: how many is known where the call is written.
    parts.append("..." if several else "AtenTensorHandle* result")
    return f"AOTITorchError aoti_torch_cpu_{name}({', '.join(parts)})"


def export_symbols() -> None:
    """Let libraries that are loaded from now on call the functions by their names."""
    ctypes.CDLL(str(load_library()), mode=ctypes.RTLD_GLOBAL)
