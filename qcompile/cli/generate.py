"""``qcompile generate``: load, plan, pack, compile, and stream text.

Comes in: a checkpoint and a prompt. Goes out: the continuation, or JSON, on stdout, everything else
on stderr. Always holds: times are of the same run; compiling is not counted as prefill or decode.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import qcompile
from qcompile.artifact_header import is_artifact
from qcompile.cli.ready import Clock, Ready, Report
from qcompile.cli.screen import say, width
from qcompile.errors import OptionError, SchemeError, nearest

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class Bar:
    """A progress bar for packing, made on its first report."""

    bar: Any = None
    seconds: float = 0.0
    begin: float = 0.0

    def __call__(self, name: str, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` bytes are packed and ``name`` is next."""
        if self.bar is None:
            self.begin = time.perf_counter()
            self.bar = tqdm(
                total=total, unit="B", unit_scale=True, desc="packing", leave=True, disable=None
            )
        self.bar.set_postfix_str(name, refresh=False)
        self.bar.update(done - self.bar.n)
        if done == total:
            self.seconds += time.perf_counter() - self.begin
            self.bar.close()
            self.bar = None


def run_generate(arguments: argparse.Namespace) -> int:
    """Continue a prompt with a checkpoint's model, or answer in a conversation."""
    if arguments.chat:
        from qcompile.cli.chat import chat

        chat(arguments)
        return 0
    if arguments.system is not None:
        raise OptionError("--system", "given without --chat", "a conversation", "add --chat")
    if arguments.prompt is None:
        raise OptionError(
            "the command line", "no --prompt", "--prompt TEXT, or --chat", "say what to continue"
        )
    generate(arguments.file, arguments.prompt, arguments)
    return 0


def generate(path: str | Path, prompt: str, arguments: argparse.Namespace) -> None:
    """Load a checkpoint, say what was planned, generate, say how fast."""
    ready = load(path, arguments)
    ids = _tokens(ready.tokenizer, prompt)
    compiled = ready.compile(ids)
    if not arguments.json:
        print(prompt, end="", flush=True)
    clock, made = stream(ready, ids, arguments)
    report = ready.report(clock, ids, compiled)
    say(report.text)
    if arguments.json:
        print(as_json(path, ready, {"prompt": prompt, "text": ready.text(made, ids)}, report))


@dataclass(frozen=True)
class Loaded:
    """A compiled model with its tokenizer.

    Attributes:
        model, tokenizer: what ``qcompile.load`` returned.
        bar: counts the time of packing.
        seconds: what loading took, without packing.
    """

    model: Any
    tokenizer: Any
    bar: Bar
    seconds: float

    @property
    def limit(self) -> int | None:
        """Tokens that a text may have, where the model says it."""
        limit: int | None = getattr(
            self.model.config.get_text_config(), "max_position_embeddings", None
        )
        return limit

    @property
    def facts(self) -> dict[str, object]:
        """What runs it."""
        plan = self.model.qcompile.plan
        return {"target": str(plan.target), "emitter": plan.emitter}

    def compile(self, ids: torch.Tensor) -> float:
        """Trace and compile what a run needs; the seconds it took, without packing."""
        say("tracing and compiling for {target} ({emitter}) ...".format(**self.facts))
        packed_before, begin = self.bar.seconds, time.perf_counter()
        self.run(ids, 3, None)
        return time.perf_counter() - begin - (self.bar.seconds - packed_before)

    def run(self, ids: torch.Tensor, tokens: int, streamer: Clock | None) -> torch.Tensor:
        """Continue ids ``[1, T]`` greedily; all ids."""
        # A static cache has one shape for all steps: one graph less to trace than a growing one.
        made: torch.Tensor = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            cache_implementation="static",
            streamer=streamer,
        )
        return made

    def report(self, clock: Clock, ids: torch.Tensor, compiled: float) -> Report:
        """How long a run took that began with ``ids``."""
        graphs = self.model.qcompile.compiles
        return Report(clock, ids.shape[1], self.seconds, self.bar.seconds, compiled, graphs)

    def text(self, made: torch.Tensor, ids: torch.Tensor) -> str:
        """What was made beyond ``ids``."""
        text: str = self.tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
        return text


def load(path: str | Path, arguments: argparse.Namespace) -> Ready:
    """Load a checkpoint, or open an artifact, and say what was planned.

    Raises:
        SchemeError: it has no tokenizer.
    """
    if arguments.tokens < 1:
        raise OptionError("--tokens", str(arguments.tokens), "1 or more", "ask for some tokens")
    if is_artifact(path):
        from qcompile.cli.saved import open_saved

        return open_saved(path, arguments)
    dtype = dtype_of(arguments.dtype)
    bar = Bar()
    begin = time.perf_counter()
    model, tokenizer = qcompile.load(
        path,
        arguments.device,
        dtype,
        arguments.emulate,
        verify=arguments.verify,
        scheme=arguments.scheme,
        on_unsupported=arguments.on_unsupported,
        emitter=arguments.emitter,
        numerics=arguments.numerics,
        progress=bar,
    )
    if tokenizer is None:
        raise SchemeError(
            str(path), "no tokenizer", "tokenizer.json beside the weights", "download it too"
        )
    seconds = time.perf_counter() - begin - bar.seconds
    session: Any = model.qcompile
    say(session.plan.text(width(sys.stderr)))
    if arguments.verify:
        say(f"verified {len(session.verification)} sites; worst: {session.verification[0]}")
    return Loaded(model, tokenizer, bar, seconds)


def as_json(path: str | Path, ready: Ready, said: dict[str, object], report: Report) -> str:
    """What was said, and what was measured."""
    return json.dumps({"file": str(path), **said, **ready.facts, **report.facts}, indent=2)


def dtype_of(name: str | None) -> torch.dtype | None:
    """The dtype that an option names. Raises OptionError for an unknown one."""
    if name is None:
        return None
    if name not in DTYPES:
        raise OptionError(
            f"--dtype {name}",
            "unknown",
            f"one of {', '.join(DTYPES)}",
            f"name a known dtype{nearest(name, DTYPES)}",
        )
    return DTYPES[name]


def _tokens(tokenizer: Any, prompt: str) -> torch.Tensor:
    """The prompt's ids, int64 ``[1, T]``."""
    ids: torch.Tensor = tokenizer(prompt, return_tensors="pt").input_ids
    if not ids.numel():
        raise OptionError(
            f"--prompt {prompt!r}",
            "no tokens: it is empty, and the model has no token for the beginning of a text",
            "a prompt with text",
            "write some text",
        )
    return ids


def stream(
    ready: Ready, ids: torch.Tensor, arguments: argparse.Namespace
) -> tuple[Clock, torch.Tensor]:
    """Generate, printing text as it comes unless JSON was asked for; times and all ids."""
    from transformers import TextStreamer

    text = None
    if not arguments.json:
        text = TextStreamer(ready.tokenizer, skip_prompt=True, skip_special_tokens=True)
    clock = Clock(text)
    clock.times.append(time.perf_counter())
    return clock, ready.run(ids, arguments.tokens, clock)
