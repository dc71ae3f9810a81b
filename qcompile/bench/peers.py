"""What a model's speed is compared with, and what each comparison needs.

Comes in: names of peers. Goes out: contenders: how to start the process of each, or why not.
Always holds: a peer that cannot run here is named with what to install; nothing of a peer is
imported in this process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qcompile.errors import OptionError, nearest

PEERS = ("llama.cpp", "transformers")
INTERPRETER = "QCOMPILE_LLAMA_CPP_PYTHON"
_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Contender:
    """One that is measured in a process of its own.

    Attributes:
        name: how tables call it.
        command: starts its worker, which speaks as ``qcompile.bench.model_worker`` says.
        batches: whether it runs several sequences at once.
        note: what it does with weights and activations.
    """

    name: str
    command: tuple[str, ...]
    batches: bool
    note: str


@dataclass(frozen=True)
class Missing:
    """A peer that is not measured, and why."""

    name: str
    reason: str


def own_contender(dtype: str, numerics: str) -> Contender:
    """The compiled model itself."""
    return _worker("qcompile", "qcompile", f"{dtype} activations, numerics {numerics}")


def reference() -> Contender:
    """The float32 model that outputs are compared with."""
    return _worker("reference", "reference", "every weight decoded to float32, not compiled")


def peers(names: Sequence[str], file: str, device: str) -> list[Contender | Missing]:
    """The peers of these names.

    Raises:
        OptionError: a name is not known.
    """
    found: list[Contender | Missing] = []
    for name in names:
        if name not in PEERS:
            raise OptionError(
                f"--against {name}",
                "unknown",
                f"some of {', '.join(PEERS)}, separated by commas, or none",
                f"name a known peer{nearest(name, PEERS)}",
            )
        if device.partition(":")[0] != "cpu":
            found.append(Missing(name, f"measured on a CPU only, and the device is {device}"))
        elif name == "transformers":
            found.append(
                _worker(name, "transformers", "weights decoded to bfloat16, torch.compile")
            )
        else:
            found.append(_llama_cpp(file))
    return found


def _worker(name: str, kind: str, note: str) -> Contender:
    command = (sys.executable, "-m", "qcompile.bench.model_worker", kind)
    return Contender(name, command, True, note)


def _llama_cpp(file: str) -> Contender | Missing:
    if Path(file).is_dir():
        return Missing("llama.cpp", "it reads GGUF files, and this is a folder")
    python = os.environ.get(INTERPRETER) or sys.executable
    try:
        found = subprocess.run(
            [python, "-c", "import llama_cpp"], capture_output=True, text=True, check=False
        )
    except OSError as error:
        return Missing("llama.cpp", f"{INTERPRETER}={python} does not run: {error.strerror}")
    if found.returncode:
        last = (found.stderr.strip().splitlines() or [f"exit code {found.returncode}"])[-1]
        return Missing(
            "llama.cpp",
            f"{python} does not import llama_cpp ({last}); pip install llama-cpp-python,"
            f" or name the interpreter that has it in {INTERPRETER}",
        )
    command = (python, str(_HERE / "peers_llama_cpp.py"))
    note = "the package's defaults, n_batch = n_ubatch = 512"
    return Contender("llama.cpp", command, False, note)
