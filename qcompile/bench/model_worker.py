"""One contender in a process of its own: ours, transformers, or the float32 reference.

Comes in: JSON lines on stdin: ``{"do": "load", ...}``, then ``run``, ``logits`` and ``memory`` with
the arguments of the methods below. Goes out: one JSON line for each, ``{"error": ...}`` on failure.
Always holds: a model is loaded once; prefill is the forward call on the prompt, which fills a
static cache, and decode runs from the first new token to the last, both inside ``generate``.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from qcompile.bench.peers_llama_cpp import memory, serve

if TYPE_CHECKING:
    from qcompile.session import Session

_GRAPHS = 64  # torch's limit of 8 for a code object would send a model back to eager
# What outputs are compared on.
TEXT = (
    "A steam engine is a heat engine that performs mechanical work using steam as its working "
    "fluid. The steam pushes a piston back and forth inside a cylinder, and a connecting rod and a "
    "crank turn this force into rotation. The first engines that were sold pumped water out of "
    "mines in 1712; sixty years later a separate condenser made them burn less than half of the "
    "coal. They drove mills, ships and locomotives until turbines, motors and the internal "
    "combustion engine took their place. Why did it take so long? Boilers burst, iron was dear, "
    "and nobody could bore a cylinder that was round to the thickness of a thin coin."
)


class _Clock:
    """A logits processor that changes nothing and notes when each step's logits came."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Note the time; the scores as they are."""
        self.seen.append(time.perf_counter())
        return scores


class Worker:
    """A Hugging Face model, compiled by qcompile or with decoded weights."""

    def __init__(self, kind: str) -> None:
        begin = time.perf_counter()
        import torch
        import transformers  # noqa: F401

        import qcompile  # noqa: F401

        self.kind, self.torch = kind, torch
        self.imported = time.perf_counter() - begin
        self.model: Any = None
        self.tokenizer: Any = None
        self.plain: Any = None  # not compiled: one graph less to wait for where nothing is timed
        self.forwards: list[float] = []

    def load(
        self, file: str, device: str, dtype: str, numerics: str, **unused: object
    ) -> dict[str, Any]:
        """Load the file."""
        from qcompile.bench.machine import versions
        from qcompile.bench.models import text_tokens
        from qcompile.prepare import backend_of

        baseline = memory("VmRSS")
        if self.kind == "qcompile":
            backend_of(device)[1].prepare()  # builds the kernels where nobody has done so yet
        begin = time.perf_counter()
        if self.kind == "qcompile":
            self.model, weights = self._own(file, device, dtype, numerics)
        else:
            float32 = self.kind == "reference"
            self.model = self._decoded(file, "float32" if float32 else "bfloat16")
            weights = sum(p.nbytes for p in self.model.parameters())
        self.model.generation_config.eos_token_id = None  # nothing ends a text early
        seconds = time.perf_counter() - begin
        self._time_forward()
        text, prefix = text_tokens(self.tokenizer, TEXT)
        return {
            "seconds": seconds,
            "import_seconds": self.imported,
            "baseline": baseline,
            "weights": weights,
            "versions": versions("transformers"),
            "vocabulary": self.model.get_input_embeddings().weight.shape[0],
            "text": [*prefix, *text],
        }

    def _own(self, file: str, device: str, dtype: str, numerics: str) -> tuple[Any, int]:
        import qcompile
        from qcompile.cli.generate import dtype_of
        from qcompile.kernel import Numerics

        asked = cast("Numerics", numerics)  # load refuses any other
        model, self.tokenizer = qcompile.load(file, device, dtype_of(dtype), numerics=asked)
        session = cast("Session", model.qcompile)
        # The first graph would do this, and peers do it when they load.
        session.pack_all(session.plan.entries)
        floats = sum(weight.nbytes for weight in session.plan.floats)
        return model, session.plan.bytes_after + floats

    def _decoded(self, file: str, dtype: str) -> Any:
        from qcompile.bench.models import decoded_model
        from qcompile.cli.generate import dtype_of
        from qcompile.schemes import open_checkpoint

        wanted = dtype_of(dtype)
        assert wanted is not None
        model, self.tokenizer = decoded_model(open_checkpoint(file), wanted)
        if self.kind == "transformers":
            self.plain = model.forward
            model.forward = self.torch.compile(model.forward)
        return model

    def run(self, ids: list[list[int]], tokens: int) -> dict[str, Any]:
        """Read prompts of one length and continue them greedily.

        Returns:
            ``prefill`` and ``decode``, seconds; decode of all tokens but the first.
        """
        from transformers import LogitsProcessorList

        given, clock = self.torch.tensor(ids), _Clock()
        given = given.to(next(self.model.parameters()).device)
        self.forwards.clear()
        with self._settings():
            self.model.generate(
                given,
                attention_mask=self.torch.ones_like(given),
                max_new_tokens=tokens,
                do_sample=False,
                cache_implementation="static",
                logits_processor=LogitsProcessorList([clock]),
            )
        return {
            "prefill": self.forwards[0],
            "decode": clock.seen[-1] - clock.seen[0],
        }

    def logits(self, ids: list[int], out: str) -> dict[str, Any]:
        """Write float32 ``[T, V]`` logits to a file of numpy's."""
        import numpy as np

        from qcompile.bench.models import logits_of

        with self._settings():
            found = logits_of(self.plain or self.model)(self.torch.tensor(ids))
        np.save(out, found.float().numpy())
        return {}

    def memory(self) -> dict[str, Any]:
        """Peak of the resident set."""
        return {"peak": memory("VmHWM")}

    # **** parts of the above ****

    @contextlib.contextmanager
    def _settings(self) -> Iterator[None]:
        from torch._dynamo import config

        with config.patch(recompile_limit=_GRAPHS):
            yield

    def _time_forward(self) -> None:
        forward = self.model.forward

        @functools.wraps(forward)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            result = forward(*args, **kwargs)
            self.forwards.append(time.perf_counter() - begin)
            return result

        self.model.forward = timed


if __name__ == "__main__":
    serve(Worker(sys.argv[1]))
