"""Which of the operators in ``schemas`` this process can call.

Comes in: a list of operators. Goes out: the first one that is there, or why none is.
Always holds: nothing of a package runs but its shared libraries, and those are loaded only when a
plan or a graph asks; no device is touched, so a plan for a device that is not here says the same.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from qcompile.backends.cuda.schemas import Operator


def find(operators: Sequence[Operator]) -> Operator | str:
    """The first operator that is registered, or why none is.

    Args:
        operators: in the order of preference; at least one.
    """
    reasons = []
    for one in operators:
        reason = _missing(one)
        if reason is None:
            return one
        reasons.append(reason)
    packages = list(dict.fromkeys(one.package for one in operators))
    if any(_is_installed(one.module) for one in operators) or any(map(_registered, operators)):
        return "; ".join(reasons)
    names = f"package {packages[0]} is" if len(packages) == 1 else _none_of(packages)
    wanted = " or ".join(f"{one.name} ({one.package} {one.version})" for one in operators)
    return f"{names} not installed: the kernel calls {wanted}"


def overload(operator: Operator) -> Any:
    """The callable of a registered operator."""
    namespace, _, name = operator.name.partition("::")
    return getattr(getattr(torch.ops, namespace), name).default


def _none_of(packages: Sequence[str]) -> str:
    return f"packages {', '.join(packages[:-1])} and {packages[-1]} are"


def _missing(operator: Operator) -> str | None:
    """Why an operator cannot be called, or None."""
    found = _registered(operator)
    if found is None and _is_installed(operator.module) and operator.libraries:
        failure = _load(operator.module, operator.libraries)
        if failure is not None:
            return f"package {operator.package} is installed, but {failure}"
        found = _registered(operator)
    if found is None:
        if not _is_installed(operator.module):
            return f"package {operator.package} is not installed"
        tail = operator.remedy or f"release {operator.version} has it"
        return f"package {operator.package} is installed without {operator.name} ({tail})"
    if found != _plain(operator):
        return (
            f"{operator.name} is {found}, not the one of {operator.package} {operator.version}: "
            f"{_plain(operator)}"
        )
    return None


def _plain(operator: Operator) -> str:
    """The schema as torch prints it."""
    return str(torch._C.parse_schema(operator.name + operator.schema))


def _registered(operator: Operator) -> str | None:
    """The schema that torch has under the operator's name, None where there is none."""
    namespace, _, name = operator.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if packet is None:
        return None
    if "default" not in packet.overloads():
        return f"{operator.name} with the overloads {', '.join(packet.overloads())}"
    return str(packet.default._schema)


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


@functools.cache
def _load(module: str, patterns: tuple[str, ...]) -> str | None:
    """Load the libraries of a package that match; what went wrong, or None."""
    spec = importlib.util.find_spec(module)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    files = [file for folder in folders for p in patterns for file in sorted(Path(folder).glob(p))]
    if not files:
        return f"it has no {' or '.join(patterns)}"
    failures = []
    for file in files:
        try:
            torch.ops.load_library(str(file))
        except OSError as error:
            failures.append(f"{file.name} does not load: {error}")
    return failures[0] if len(failures) == len(files) else None
