"""Inductor's settings for our graphs, and the mark that keeps its cache apart from older code.

Comes in: the native libraries that are loaded. Goes out: settings for ``compile_fx``.
Always holds: code that Inductor cached for one build of our ops is not used with another.

Inductor's cache knows a graph by the names of its ops. What it compiled also holds what the fake
implementations of those said of their results, such as strides; where these change, it is wrong.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

import qcompile


class Stamp(CustomGraphPass):
    """A pass that changes nothing, whose identity becomes part of the cache's key."""

    def __init__(self) -> None:
        libraries = sorted(Path(path).name for path in torch.ops.loaded_libraries)
        facts = "\0".join((qcompile.__version__, *libraries))
        self.stamp = hashlib.sha256(facts.encode()).hexdigest()

    def __call__(self, graph: fx.Graph) -> None:
        """Leave the graph as it is."""

    def uuid(self) -> str:
        """What the cache's key takes."""
        return self.stamp


def settings() -> dict[str, Any]:
    """Settings for the graphs of one session; a pass that the user has set stays."""
    if config.post_grad_custom_post_pass is not None:
        return {}
    return {"post_grad_custom_post_pass": Stamp()}
