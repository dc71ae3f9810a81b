"""Inductor's settings for our graphs, and the mark that keeps its cache apart from older code.

Comes in: the native libraries that are loaded, the backends' code. Goes out: settings for
``compile_fx``. Always holds: code that Inductor cached for one build of our ops is not used with
another.

Inductor's cache knows a graph by the names of its ops. What it compiled also holds what the fake
implementations of those said of their results, such as strides; where these change, it is wrong.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

import qcompile
from qcompile import backends


class Stamp(CustomGraphPass):
    """A pass whose identity is part of the cache's key; it runs those that the user has set."""

    def __init__(self, own: Sequence[Callable[[fx.Graph], None]] = ()) -> None:
        libraries = sorted(Path(path).name for path in torch.ops.loaded_libraries)
        facts = "\0".join((qcompile.__version__, _fakes(), *libraries))
        self.own = tuple(own)
        self.stamp = hashlib.sha256(facts.encode()).hexdigest()

    def __call__(self, graph: fx.Graph) -> None:
        """Leave the graph to the user's passes, or as it is."""
        for rewrite in self.own:
            rewrite(graph)

    def uuid(self) -> Any:
        """What the cache's key takes; None, which means no caching, where a user's has none."""
        names = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in self.own]
        return None if None in names else (self.stamp, *names)


@functools.cache
def _fakes() -> str:
    """A digest of the files in which backends describe their ops."""
    digest = hashlib.sha256()
    for file in sorted(Path(backends.__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def settings() -> dict[str, Any]:
    """Settings for the graphs of one session."""
    own = config.post_grad_custom_post_pass
    several = own if isinstance(own, (list, tuple)) else () if own is None else (own,)
    return {"post_grad_custom_post_pass": Stamp(several)}
