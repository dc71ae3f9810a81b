"""What is known of sizes, and that asking for numbers loads nothing."""

from __future__ import annotations

import subprocess
import sys

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from qcompile.sizes import is_number, known_true


def traced() -> torch.SymInt:
    """A size that is a symbol."""

    def twice(x: torch.Tensor) -> torch.Tensor:
        return x + x

    graph: fx.GraphModule = make_fx(twice, tracing_mode="symbolic")(torch.randn(7, 3))
    size = graph.graph.find_nodes(op="placeholder")[0].meta["val"].shape[0]
    assert isinstance(size, torch.SymInt)
    return size


def test_numbers() -> None:
    assert is_number(3)
    assert known_true(True)
    assert not known_true(False)


def test_symbols() -> None:
    size = traced()
    assert not is_number(size)
    assert known_true(size == size)
    assert not known_true(size == 7)
    shape_env = size.node.shape_env
    assert not shape_env.guards


def test_numbers_need_no_symbols() -> None:
    """Neither do plans, nor artifacts that run."""
    code = (
        "import sys; import torch; known = 'sympy' in sys.modules\n"
        "import qcompile.backends.cpu, qcompile.artifact\n"
        "from qcompile.sizes import is_number, known_true\n"
        "assert is_number(1) and known_true(True)\n"
        "assert known or 'sympy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
