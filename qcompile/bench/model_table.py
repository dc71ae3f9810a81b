"""A report of ``qcompile.bench.model`` as text, Markdown and JSON.

Comes in: a report. Goes out: lines, or values that JSON has.
Always holds: every figure stands beside its spread; the machine, versions and date are part of
Markdown and JSON; a peer that is missing is named in all three.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from typing import Any

from qcompile.bench.model import Figures, Options, Report, ratios
from qcompile.bench.peers import EXPORTED
from qcompile.bench.tables import aligned, heading, piped, spread, urgent

_HEAD = (
    "",
    "prompt",
    "batch",
    "prefill tok/s",
    "(min to max)",
    "decode tok/s",
    "(min to max)",
)
_RATIOS = ("ours is", "exported is")
_COSTS = ("", "load s", "compile s", "weights MB", "peak MB", "imports MB", "top-1", "mean KL")


def text(report: Report) -> str:
    """The tables for a terminal, in at most 100 columns."""
    lines = [*_shown(report), "", *aligned(_costs(report))]
    return "\n".join([*lines, *(f"\n{name}: {why}" for name, why in _absent(report))])


def _shown(report: Report) -> list[str]:
    """The speeds; with ratios of the exported model all ratios make a table of their own."""
    rows, width = _speeds(report), len(_HEAD)
    if len(rows[0]) == width + 1:
        return aligned(rows)
    ratios_only = [(*row[:3], *row[width:]) for row in rows if any(row[width:])]
    return [*aligned([row[:width] for row in rows]), "", *aligned(ratios_only)]


def markdown(report: Report) -> str:
    """The same with the command, machine, versions and date."""
    options = report.options
    how = (
        f"{options.threads} threads each, {options.tokens} tokens after a prompt, medians of "
        f"{options.rounds} rounds in turns"
    )
    notes = (
        *(f"{figures.name}: {figures.note}" for figures in report.contenders),
        *(f"{name}, not measured: {why}" for name, why in _absent(report)),
    )
    given = (command(options), report.date, report.machine, _versions(report))
    head = heading(*given, how, notes)
    return "\n".join([*head, *piped(_speeds(report)), "", *piped(_costs(report)), "", _NOTES])


_NOTES = """Load is from the call to packed weights, without imports (whose resident memory is the
column *imports*); compile is what the first runs took longer than later ones, and what an export
took, which is a process of its own. Peak is the process's largest resident set before outputs were
compared. Top-1 is the share of positions of a fixed text where the likeliest token is that of the
float32 model, KL the mean divergence from it."""


def record(report: Report) -> dict[str, Any]:
    """Everything that was measured."""
    return {
        "command": command(report.options),
        "date": report.date,
        "machine": report.machine,
        "versions": _versions(report),
        "options": dataclasses.asdict(report.options),
        "contenders": [_contender(figures) for figures in report.contenders],
        "missing": [dataclasses.asdict(missing) for missing in report.missing],
    }


def _contender(figures: Figures) -> dict[str, Any]:
    """With rates as a list, since keys in JSON are text."""
    content = dataclasses.asdict(figures)
    content.pop("decode")
    content["rates"] = [
        {**size._asdict(), "prefill": rates, "decode": figures.decode[size]}
        for size, rates in content.pop("prefill").items()
    ]
    return content


def command(options: Options) -> str:
    """The command line that measures the same."""
    given = {
        "device": options.device,
        "against": ",".join(options.against) or "none",
        "prompt-tokens": ",".join(map(str, options.prompts)),
        "tokens": options.tokens,
        "batch": ",".join(map(str, options.batches)),
        "dtype": options.dtype,
        "numerics": options.numerics,
        "rounds": options.rounds,
        "threads": options.threads,
        "compared": options.compared,
    }
    exported = " --exported" if options.exported else ""
    words = (f"--{name} {value}" for name, value in given.items())
    given_file = shlex.quote(options.file)
    return f"qcompile bench model {given_file} {' '.join(words)}{exported}{urgent(options)}"


# **** rows ****


def _speeds(report: Report) -> list[Sequence[str]]:
    owns = _owns(report)
    rows: list[Sequence[str]] = [(*_HEAD, *_RATIOS[: len(owns)])]
    for size in report.options.sizes:
        for figures in report.contenders:
            place = (figures.name, str(size.prompt), str(size.batch))
            if size not in figures.prefill:
                rows.append((*place, *["-"] * 4, "not measured", *[""] * (len(owns) - 1)))
                continue
            # The exported model beside the compiled one, and not the other way round as well.
            factors = (
                "" if figures in owns[at:] else _factor(ratios(own, figures, size))
                for at, own in enumerate(owns)
            )
            cells = (*spread(figures.prefill[size]), *spread(figures.decode[size]))
            rows.append((*place, *cells, *factors))
    return rows


def _owns(report: Report) -> list[Figures]:
    """The compiled model, and the exported one where it was measured."""
    return [report.contenders[0], *(f for f in report.contenders if f.name == EXPORTED)]


def _factor(found: tuple[float, float] | None) -> str:
    return "" if found is None else f"{found[0]:.2f}x, {found[1]:.2f}x"


def _costs(report: Report) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = [_COSTS]
    for figures in report.contenders:
        rows.append(
            (
                figures.name,
                f"{figures.load:.2f}",
                f"{figures.compile:.1f}",
                *(f"{n / 1e6:.0f}" for n in (figures.weights, figures.peak, figures.baseline)),
                *_outputs(figures),
            )
        )
    return rows


def _outputs(figures: Figures) -> tuple[str, str]:
    if figures.top1 is None or figures.kl is None:
        return "-", "-"
    return f"{figures.top1:.1%}", f"{figures.kl:.2g}"


def _absent(report: Report) -> list[tuple[str, str]]:
    more = {size for size in report.options.sizes if size.batch > 1}
    single = [f for f in report.contenders if more and not more & set(f.prefill)]
    return [
        *((missing.name, missing.reason) for missing in report.missing),
        *((f.name, "measured with one sequence only") for f in single),
    ]


def _versions(report: Report) -> dict[str, str]:
    found: dict[str, str] = {}
    for figures in report.contenders:
        found |= figures.versions
    return found
