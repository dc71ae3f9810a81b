"""One model compiled in a fresh process, with a clock on every stage.

Comes in: a file. Goes out: seconds of each stage and pass, and what the graphs hold.
Always holds: stages do not overlap: *trace* is what dynamo takes besides the stages inside it, and
*run* what the two calls take once everything is compiled; passes are parts of *passes*.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

import torch

from .serve import serve

_PROMPT, _CONTEXT = 32, 64


class Stopwatch:
    """Adds up seconds by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, its seconds added to ``name``."""

        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.add(name, time.perf_counter() - start)

        return run

    def add(self, name: str, seconds: float) -> None:
        """Add seconds."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds


class Worker:
    """Answers ``compile``."""

    def compile(self, file: str, dtype: str, numerics: str) -> dict[str, Any]:
        """Load and compile a model, run a prompt and a token."""
        import qcompile
        from qcompile.bench.machine import versions
        from qcompile.cli.generate import dtype_of
        from qcompile.kernel import Numerics
        from qcompile.prepare import backend_of

        backend_of("cpu")[1].prepare()  # the kernels' own compilation is no part of this
        watch = Stopwatch()
        watch.timed("open", qcompile.open)(file)  # load opens it once more
        asked = {"dtype": dtype_of(dtype), "numerics": cast("Numerics", numerics)}
        load = watch.timed("open, build, plan", qcompile.load)
        model, _ = load(file, "cpu", **asked)
        session = cast("Any", model).qcompile
        watch.timed("pack", session.pack_all)(session.plan.entries)
        inside = _watch_pipeline(watch)
        first = self._calls(model)
        again = min(self._calls(model) for _ in range(2))
        found = watch.seconds
        found["trace"] = first - again - found.pop("compile_graph", 0.0)
        found["run"] = again
        found["all"] = sum(found[name] for name in (*_BEFORE, *inside, "trace") if name in found)
        counts = {"sites": len(session.plan.entries), "graphs": session.compiles}
        return {"stages": found, "counts": counts, "versions": versions("transformers")}

    def _calls(self, model: Any) -> float:
        """Seconds of a prompt and of one token after it."""
        from transformers import StaticCache

        cache = StaticCache(config=model.config, max_cache_len=_CONTEXT)
        ids = torch.arange(1, _PROMPT + 1)[None]
        start = time.perf_counter()
        with torch.no_grad():
            model(input_ids=ids, past_key_values=cache, use_cache=True)
            model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True)
        return time.perf_counter() - start


_BEFORE = ("open, build, plan", "pack")


def _watch_pipeline(watch: Stopwatch) -> tuple[str, ...]:
    """Put a clock on the pipeline's stages; their names in order."""
    from qcompile import pipeline as module

    pipeline: Any = module
    stages = {
        "capture": "capture_dynamo",
        "transform weights": "transform_weights",
        "bind the rest": "bind_leftovers",
        "inductor": "emit",
    }
    for name, function in stages.items():
        setattr(pipeline, function, watch.timed(name, getattr(pipeline, function)))
    usual = pipeline.run_pass

    def run_pass(rewrite: Any, program: Any) -> None:
        start = time.perf_counter()
        usual(rewrite, program)
        seconds = time.perf_counter() - start
        watch.add("passes", seconds)
        watch.add(f"pass {rewrite.name}", seconds)

    pipeline.run_pass = run_pass
    pipeline.compile_graph = watch.timed("compile_graph", pipeline.compile_graph)
    return (*stages, "passes")


def main() -> None:
    """Serve."""
    serve(Worker())
