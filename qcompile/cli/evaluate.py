"""``qcompile eval``: perplexity on a text, and how far from the float model.

Comes in: checkpoints and a text. Goes out: one table over the checkpoints, or JSON.
Always holds: a checkpoint and what it is compared with see the same windows of the same tokens;
one checkpoint is in memory at a time, with its references.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

import qcompile
from qcompile.bench.accuracy import Logits, Scores, measure, windows
from qcompile.bench.machine import machine, versions
from qcompile.bench.models import decoded_model, float_model, logits_of, text_tokens
from qcompile.cli.generate import dtype_of
from qcompile.cli.screen import painter, width
from qcompile.errors import OptionError
from qcompile.plan_text import size_text
from qcompile.plans import Plan
from qcompile.schemes import open_checkpoint
from qcompile.visible import one_line

FLOAT = "float"  # the same checkpoint, every weight decoded to float32
NONE = "none"


@dataclass(frozen=True)
class Result:
    """The figures of one checkpoint."""

    file: str
    plan: Plan
    scores: Scores
    windows: int


def run_eval(arguments: argparse.Namespace) -> int:
    """Measure every checkpoint and print the table."""
    text = _read(arguments.text)
    against = _against(arguments.against)
    others = {name: float_model(name) for name in against if name != FLOAT}
    results = []
    for file in arguments.files:
        results.append(_evaluate(file, text, against, others, arguments))
        gc.collect()
    if arguments.json:
        print(json.dumps(_record(results, arguments), indent=2))
    else:
        print("\n".join(_table(results, against)))
    return 0


def _read(path: str) -> str:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise OptionError(
            f"--text {path}", f"not UTF-8: {error.reason}", "a text in UTF-8", "convert it"
        ) from None
    if not text:
        raise OptionError(f"--text {path}", "empty", "a text", "name another file")
    return text


def _against(given: Sequence[str] | None) -> tuple[str, ...]:
    if not given:
        return (FLOAT,)
    if NONE in given and len(given) > 1:
        raise OptionError(
            "--against", f"{NONE} beside others", f"{NONE} alone, or none of it", "choose"
        )
    return tuple(name for name in dict.fromkeys(given) if name != NONE)


# **** one checkpoint ****


def _evaluate(
    file: str,
    text: str,
    against: Sequence[str],
    others: dict[str, tuple[nn.Module, Any]],
    arguments: argparse.Namespace,
) -> Result:
    model, tokenizer = qcompile.load(
        file,
        arguments.device,
        dtype_of(arguments.dtype),
        arguments.emulate,
        scheme=arguments.scheme,
        on_unsupported=arguments.on_unsupported,
        emitter=arguments.emitter,
    )
    session: Any = model.qcompile
    ids, prefix = text_tokens(tokenizer, text)
    texts = windows(ids, prefix, arguments.window, arguments.tokens)
    references: dict[str, Logits] = {}
    for name in against:
        if name == FLOAT:
            opened = open_checkpoint(file, arguments.scheme)
            references[name] = logits_of(decoded_model(opened, torch.float32)[0])
            continue
        other, its_tokenizer = others[name]
        if text_tokens(its_tokenizer, text) != (ids, prefix):
            raise OptionError(
                f"--against {name}",
                f"its tokenizer cuts the text otherwise than that of {file}",
                "a model with the same tokenizer",
                "name the float model of this checkpoint",
            )
        references[name] = logits_of(other)
    with tqdm(total=len(texts), desc=Path(file).name, unit="window", disable=None) as bar:
        scores = measure(texts, len(prefix), logits_of(model), references, bar.update)
    return Result(file, session.plan, scores, len(texts))


# **** output ****


def _record(results: Sequence[Result], arguments: argparse.Namespace) -> dict[str, object]:
    return {
        "text": arguments.text,
        "window": arguments.window,
        "machine": machine(),
        "versions": versions("transformers", "gguf"),
        "results": [_result_record(result) for result in results],
    }


def _result_record(result: Result) -> dict[str, object]:
    plan, scores = result.plan, result.scores
    return {
        "file": result.file,
        "scheme": plan.scheme,
        "target": str(plan.target),
        "emitter": plan.emitter,
        "bytes_stored": plan.bytes_before,
        "bytes_packed": plan.bytes_after,
        "bits_a_weight": _bits(plan),
        "windows": result.windows,
        "tokens": scores.perplexity.tokens,
        "perplexity": scores.perplexity.value,
        "perplexity_error": scores.perplexity.spread,
        "nll": scores.perplexity.nll,
        "against": {
            name: {
                **{"perplexity": d.reference.value, "nll": d.reference.nll},
                **{"kl": d.kl, "kl_worst": d.worst, "top1": d.top1},
            }
            for name, d in scores.distances.items()
        },
    }


def _bits(plan: Plan) -> float:
    """Stored bits of a weight of the sites, scales and all."""
    return 16 * plan.bytes_before / plan.bytes_as_halves if plan.bytes_as_halves else math.nan


def _table(results: Sequence[Result], against: Sequence[str]) -> list[str]:
    """One line for each checkpoint; what each reference adds stands in columns under its name."""
    heads = ["checkpoint", "scheme", "bits", "packed", "perplexity"]
    rows = [[*_cells(result)] for result in results]
    groups = [("", len(heads))]
    for name in against:
        heads += ["perplexity", "KL", "top-1"]
        groups.append((f"against {one_line(Path(name).name)}", 3))
        for row, result in zip(rows, results, strict=True):
            found = result.scores.distances[name]
            row += [f"{found.reference.value:.3f}", f"{found.kl:.2g}", f"{found.top1:.2%}"]
    limit = width()
    for dropped in ("packed", "scheme", "bits"):
        if limit is not None and _length(heads, rows) > limit and dropped in heads:
            at = heads.index(dropped)
            for row in (heads, *rows):
                del row[at]
            groups[0] = ("", groups[0][1] - 1)
    return [*_lines(heads, rows, groups), _remark(results)]


def _cells(result: Result) -> list[str]:
    plan, found = result.plan, result.scores.perplexity
    return [
        one_line(Path(result.file).name),
        plan.scheme,
        f"{_bits(plan):.2f}",
        size_text(plan.bytes_after),
        f"{found.value:.3f} +- {found.spread:.2f}",
    ]


def _length(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    return sum(_widths(heads, rows)) + 2 * len(heads) - 2


def _widths(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))]


def _lines(
    heads: Sequence[str], rows: Sequence[Sequence[str]], groups: Sequence[tuple[str, int]]
) -> list[str]:
    widths = _widths(heads, rows)
    paint, over, at = painter(), [], 0
    for title, count in groups:
        over.append(title.rjust(sum(widths[at : at + count]) + 2 * count - 2))
        at += count
    lines = [
        "  ".join(
            cell.ljust(wide) if i == 0 or heads[i] == "scheme" else cell.rjust(wide)
            for i, (cell, wide) in enumerate(zip(row, widths, strict=True))
        )
        for row in (heads, *rows)
    ]
    above = "  ".join(over).rstrip()
    return [*([paint("dim", above)] if above else []), paint("dim", lines[0]), *lines[1:]]


def _remark(results: Sequence[Result]) -> str:
    counts = sorted({result.scores.perplexity.tokens for result in results})
    if len(counts) > 1:
        return "the checkpoints cut the text into different tokens: perplexities do not compare"
    compared = any(result.scores.distances for result in results)
    return f"{counts[0]} tokens predicted" + ("; KL in nats, a mean over them" if compared else "")
