"""What a model's speed is compared with, and what each comparison needs.

Comes in: names of peers. Goes out: contenders: how to start the process of each, or why not.
Always holds: a peer that cannot run here is named with what to install; nothing of a peer is
imported in this process.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qcompile.errors import OptionError, nearest

PEERS = ("llama.cpp", "transformers", "torchao-int4", "torchao-int8", "gptqmodel")
INTERPRETER = "QCOMPILE_LLAMA_CPP_PYTHON"
PACKAGES = "QCOMPILE_PEERS_PYTHON"
GPTQMODEL = "QCOMPILE_GPTQMODEL_PYTHON"
EXPORTED = "qcompile, exported"
_GROUPS = {"torchao": ("torchao-int4", "torchao-int8")}  # one name for both
WORKERS = Path(__file__).parent / "workers"


@dataclass(frozen=True)
class Contender:
    """One that is measured in a process of its own.

    Attributes:
        name: how tables call it.
        command: starts its worker, which speaks as ``qcompile.bench.model_worker`` says.
        batches: whether it runs several sequences at once.
        note: what it does with weights and activations.
        own: whether it is this package, whose failure is nobody's absence.
    """

    name: str
    command: tuple[str, ...]
    batches: bool
    note: str
    own: bool = False


@dataclass(frozen=True)
class Missing:
    """A peer that is not measured, and why."""

    name: str
    reason: str


def own_contenders(dtype: str, numerics: str, exported: bool) -> list[Contender]:
    """The compiled model itself, and the same as it is saved where that is asked for."""
    note = f"{dtype} activations, numerics {numerics}"
    compiled = dataclasses.replace(_worker("qcompile", "qcompile", note), own=True)
    if not exported:
        return [compiled]
    command = (sys.executable, "-m", "qcompile.bench.exported_worker")
    note += "; compiled ahead of time, ids only: no tokenizer in memory"
    return [compiled, Contender(EXPORTED, command, False, note, own=True)]


def reference() -> Contender:
    """The float32 model that outputs are compared with."""
    return _worker("reference", "reference", "every weight decoded to float32, not compiled")


def peers(names: Sequence[str], file: str, device: str) -> list[Contender | Missing]:
    """The peers of these names.

    Raises:
        OptionError: a name is not known.
    """
    found: list[Contender | Missing] = []
    for name in expanded(names):
        if name not in PEERS:
            raise OptionError(
                f"--against {name}",
                "unknown",
                f"some of {', '.join((*PEERS, *_GROUPS))}, separated by commas, or none",
                f"name a known peer{nearest(name, PEERS)}",
            )
        if device.partition(":")[0] != "cpu":
            found.append(Missing(name, f"measured on a CPU only, and the device is {device}"))
        elif name == "transformers":
            found.append(
                _worker(name, "transformers", "weights decoded to bfloat16, torch.compile")
            )
        elif name.startswith("torchao"):
            found.append(_torchao(name))
        else:
            found.append(_llama_cpp(file) if name == "llama.cpp" else _gptqmodel(file))
    return found


def expanded(names: Sequence[str]) -> tuple[str, ...]:
    """The names with those that stand for several replaced by them."""
    return tuple(one for name in names for one in _GROUPS.get(name, (name,)))


def _worker(name: str, kind: str, note: str) -> Contender:
    command = (sys.executable, "-m", "qcompile.bench.model_worker", kind)
    return Contender(name, command, True, note)


def _torchao(name: str) -> Contender | Missing:
    """In an interpreter that has torchao and what this package needs."""
    python = os.environ.get(PACKAGES) or sys.executable
    why = why_not(python, "torchao, transformers, gguf", "torchao transformers gguf", PACKAGES)
    if why is not None:
        return Missing(name, why)
    root = str(Path(__file__).parents[2])
    code = f"import sys; sys.path.insert(0, {root!r}); " + (
        f"from qcompile.bench.model_worker import main; main({name!r})"
    )
    bits = "4 bits by groups" if name.endswith("4") else "8 bits by rows"
    note = f"weights decoded, then {bits} by torchao, bfloat16 activations, torch.compile"
    return Contender(name, (python, "-c", code), True, note)


def _gptqmodel(file: str) -> Contender | Missing:
    """It reads folders of GPTQ checkpoints."""
    config = Path(file) / "quantize_config.json", Path(file) / "config.json"
    texts = [place.read_text(encoding="utf-8") for place in config if place.is_file()]
    if not any('"gptq"' in text for text in texts):
        return Missing("gptqmodel", "it reads folders of GPTQ checkpoints, and this is none")
    python = os.environ.get(GPTQMODEL) or sys.executable
    why = why_not(python, "gptqmodel", "gptqmodel", GPTQMODEL)
    if why is not None:
        return Missing("gptqmodel", why)
    command = (python, str(WORKERS / "start.py"), "model_gptqmodel")
    return Contender("gptqmodel", command, True, "the kernel it chooses, bfloat16 activations")


def _llama_cpp(file: str) -> Contender | Missing:
    if Path(file).is_dir():
        return Missing("llama.cpp", "it reads GGUF files, and this is a folder")
    python = os.environ.get(INTERPRETER) or sys.executable
    why = why_not(python, "llama_cpp", "llama-cpp-python", INTERPRETER)
    if why is not None:
        return Missing("llama.cpp", why)
    command = (python, str(WORKERS / "start.py"), "model_llama_cpp")
    note = "the package's defaults, n_batch = n_ubatch = 512"
    return Contender("llama.cpp", command, False, note)


_FIND = """
import sys
from importlib.util import find_spec
missing = [name for name in sys.argv[1:] if find_spec(name) is None]
sys.exit(f"ModuleNotFoundError: {', '.join(missing)}" if missing else 0)
"""


def why_not(python: str, module: str, package: str, variable: str) -> str | None:
    """Why an interpreter cannot run a peer; None when it finds the peer's module.

    Nothing is imported, which takes seconds: a module that is there and broken is told when the
    peer's process starts.

    Args:
        python: the interpreter.
        module: what it has to find; several with commas.
        package: what to install.
        variable: of the environment, which names the interpreter.
    """
    try:
        found = subprocess.run(
            [python, "-c", _FIND, *module.split(", ")], capture_output=True, text=True, check=False
        )
    except OSError as error:
        return f"{variable}={python} does not run: {error.strerror}"
    if not found.returncode:
        return None
    last = (found.stderr.strip().splitlines() or [f"exit code {found.returncode}"])[-1]
    return (
        f"{python} does not find {module} ({last}); pip install {package},"
        f" or name the interpreter that has it in {variable}"
    )


def library_folder(python: str) -> str | None:
    """Where an interpreter's llama-cpp-python has its libraries; None where it has none."""
    code = (
        "import importlib.util as u, os; "
        "print(os.path.join(os.path.dirname(u.find_spec('llama_cpp').origin), 'lib'))"
    )
    try:
        found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return None if found.returncode else found.stdout.strip()
