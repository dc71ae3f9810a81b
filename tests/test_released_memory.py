"""What is dropped once a graph is compiled."""

from __future__ import annotations

import linecache

from torch import fx, nn

from qcompile import memory


def test_lines_of_files_go_and_lines_of_generated_code_stay() -> None:
    code = fx.symbolic_trace(nn.ReLU()).forward.__code__.co_filename
    assert "relu" in "".join(linecache.getlines(code))
    assert linecache.getlines(memory.__file__)
    memory.forget_traces()
    assert memory.__file__ not in linecache.cache
    assert "relu" in "".join(linecache.getlines(code))
    assert linecache.getlines(memory.__file__)  # and they are read again when they are asked for
