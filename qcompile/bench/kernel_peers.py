"""Other libraries' products of quantized weights, and what each needs to be measured.

Comes in: names. Goes out: contenders, or why one is missing.
Always holds: every peer is one file in ``workers`` and one line here; nothing of a peer is imported
in this process; a peer runs in its own process, in the interpreter that its variable names.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from qcompile.bench.peers import INTERPRETER, PACKAGES, WORKERS, Contender, Missing, why_not
from qcompile.errors import OptionError, nearest

BASELINE = "torch bf16"


@dataclass(frozen=True)
class Peer:
    """A library.

    Attributes:
        name: how options and tables call it.
        worker: its module and arguments.
        imports: what its interpreter has to import; empty where torch is enough.
        install: the package that brings it.
        variable: of the environment, names the interpreter; empty for this one.
    """

    name: str
    worker: tuple[str, ...]
    imports: str = ""
    install: str = ""
    variable: str = ""


PEERS = (
    Peer("torch", ("linear_torch", "aten")),
    Peer("torch-dynamic", ("linear_torch", "dynamic")),
    Peer("torchao", ("linear_torchao",), "torchao", "torchao", PACKAGES),
    Peer("auto-round-lib", ("linear_auto_round",), "auto_round_kernel", "auto-round-lib", PACKAGES),
    Peer("bitsandbytes", ("linear_bitsandbytes",), "bitsandbytes", "bitsandbytes", PACKAGES),
    Peer("optimum-quanto", ("linear_quanto",), "optimum.quanto", "optimum-quanto", PACKAGES),
    Peer("ggml", ("linear_ggml", "default"), "llama_cpp", "llama-cpp-python", INTERPRETER),
    Peer("ggml-plain", ("linear_ggml", "plain"), "llama_cpp", "llama-cpp-python", INTERPRETER),
)
NAMES = tuple(peer.name for peer in PEERS)
QUICK = ("torch", "auto-round-lib", "ggml")


def baseline() -> Contender:
    """``F.linear`` on bfloat16 weights, which tables compare with."""
    return _contender(BASELINE, sys.executable, ("linear_torch", "bf16"))


def limits() -> Contender:
    """Reads memory, and multiplies large squares."""
    return _own("limits", "own_limits", (), "")


def own(kernel: str, target: str, dtype: str) -> Contender:
    """A kernel of this package."""
    return _own(kernel, "own_linear", (kernel, target, dtype), dtype)


def _own(name: str, worker: str, arguments: tuple[str, ...], note: str) -> Contender:
    code = f"import sys; from qcompile.bench.workers.{worker} import main; main(*sys.argv[1:])"
    return Contender(name, (sys.executable, "-c", code, *arguments), True, note)


def peers(names: Sequence[str]) -> list[Contender | Missing]:
    """The peers of these names.

    Raises:
        OptionError: a name is not known.
    """
    known = {peer.name: peer for peer in PEERS}
    for name in names:
        if name not in known:
            raise OptionError(
                f"--against {name}",
                "unknown",
                f"some of {', '.join(NAMES)}, separated by commas, or none",
                f"name a known peer{nearest(name, NAMES)}",
            )
    return [_peer(known[name]) for name in names]


def _peer(peer: Peer) -> Contender | Missing:
    python = os.environ.get(peer.variable, "") or sys.executable
    if peer.imports:
        why = why_not(python, peer.imports, peer.install, peer.variable)
        if why is not None:
            return Missing(peer.name, why)
    return _contender(peer.name, python, peer.worker)


def _contender(name: str, python: str, worker: tuple[str, ...]) -> Contender:
    return Contender(name, (python, str(WORKERS / "start.py"), *worker), True, "")
