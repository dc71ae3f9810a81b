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
from dataclasses import dataclass, replace
from itertools import groupby
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
        numerics=arguments.numerics,
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
        "numerics": plan.numerics,
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


@dataclass(frozen=True)
class _Column:
    """A column of the table.

    Attributes:
        head: its title.
        cells: one for each checkpoint.
        group: the reference that it belongs to, empty for none.
        spare: the greater, the sooner it is left out where lines are too long; never for 0.
        least: characters that it has at least.
    """

    head: str
    cells: tuple[str, ...]
    group: str = ""
    spare: int = 0
    least: int = 0

    @property
    def width(self) -> int:
        """Characters of its widest cell."""
        return max(self.least, *map(len, (self.head, *self.cells)))


def _table(results: Sequence[Result], against: Sequence[str]) -> list[str]:
    """One line for each checkpoint; the columns of a reference stand under its name."""
    columns = _columns(results)
    for name in against:
        found = [result.scores.distances[name] for result in results]
        group = f"against {one_line(Path(name).name)}"
        values = tuple(f"{d.reference.value:.3f}" for d in found)
        columns += [
            _Column("perplexity", values, group, 1),
            _Column("KL", tuple(f"{d.kl:.2g}" for d in found), group),
            _Column("top-1", tuple(f"{d.top1:.2%}" for d in found), group),
        ]
    columns = _under_titles(columns)
    limit = width()
    while limit is not None and _length(columns) > limit and any(c.spare for c in columns):
        most = max(column.spare for column in columns)
        columns = _under_titles([column for column in columns if column.spare < most])
    return [*_lines(columns, len(results)), _remark(results)]


def _under_titles(columns: Sequence[_Column]) -> list[_Column]:
    """The columns, wide enough for the titles of their groups."""
    wide: list[_Column] = []
    for group, found in groupby(columns, key=lambda column: column.group):
        first, *rest = found
        room = max(len(group) - _length(rest) - 2, 0) if rest else len(group)
        wide += [replace(first, least=room), *rest]
    return wide


def _columns(results: Sequence[Result]) -> list[_Column]:
    plans = [result.plan for result in results]
    found = [result.scores.perplexity for result in results]
    return [
        _Column("checkpoint", tuple(one_line(Path(result.file).name) for result in results)),
        _Column("scheme", tuple(plan.scheme for plan in plans), spare=3),
        _Column("bits", tuple(f"{_bits(plan):.2f}" for plan in plans), spare=2),
        _Column("packed", tuple(size_text(plan.bytes_after) for plan in plans), spare=4),
        _Column("perplexity", tuple(f"{p.value:.3f} +- {p.spread:.2f}" for p in found)),
    ]


def _length(columns: Sequence[_Column]) -> int:
    return sum(column.width for column in columns) + 2 * len(columns) - 2


def _lines(columns: Sequence[_Column], count: int) -> list[str]:
    paint = painter()
    over = [
        group.rjust(_length(list(found)))
        for group, found in groupby(columns, key=lambda column: column.group)
    ]
    rows = [[c.head for c in columns], *([c.cells[i] for c in columns] for i in range(count))]
    heads, *lines = [
        "  ".join(
            cell.ljust(column.width)
            if column.head in ("checkpoint", "scheme")
            else cell.rjust(column.width)
            for cell, column in zip(row, columns, strict=True)
        )
        for row in rows
    ]
    above = [paint("dim", "  ".join(over))] if len(over) > 1 else []
    return [*above, paint("dim", heads), *lines]


def _remark(results: Sequence[Result]) -> str:
    counts = sorted({result.scores.perplexity.tokens for result in results})
    if len(counts) > 1:
        return "the checkpoints cut the text into different tokens: perplexities do not compare"
    text = f"{counts[0]} tokens predicted"
    if any(result.scores.distances for result in results):
        text += "; KL in nats, a mean over them"
    numerics = results[0].plan.numerics
    return text if numerics == "exact" else f"{text}; numerics {numerics}"
