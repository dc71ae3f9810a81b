"""What runs where, as the kernels themselves answer: the tables of ``docs/schemes.md``.

Comes in: ``python -m qcompile.support [--write]``. Goes out: the tables on stdout, or between the
markers of the page.
Always holds: every cell is the answer of the planner for a site of that weight, without a device;
nothing is listed by hand but the weights that a scheme can store. Packages that bring Marlin are
taken as absent, a C++ compiler as present, so that every machine writes the same page.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from qcompile import backends, schemes
from qcompile.backends import default_dtype, kernels_for
from qcompile.cli.screen import say
from qcompile.errors import OptionError, QCompileError
from qcompile.experts_layout import stack_experts
from qcompile.kernel import Kernel
from qcompile.layout import QuantizedTensor
from qcompile.passes.select import select
from qcompile.plans import Entry
from qcompile.site import EmbeddingSite, ExpertsSite, LinearSite, Site
from qcompile.storable import STORED, K, N, Stored
from qcompile.target import Target
from qcompile.weight import Rows, WeightRef

PAGE = Path(__file__).resolve().parents[1] / "docs" / "schemes.md"
COMMAND = "python -m qcompile.support --write"
TARGETS = (
    *("cpu:avx512_vnni", "cpu:avx2", "cpu:neon", "cpu:generic"),
    *("cuda:sm80", "cuda:sm90", "npu:910b", "npu:310p"),
)
_EXPERTS = 4
# Kernels of other packages: named beside what runs without them.
_ELSEWHERE = ("cuda.marlin", "cuda.humming")
_NO_EDGE = "no edge leads to the layout of a kernel"
_KINDS = {"linear": "Linears", "embedding": "Embeddings", "experts": "Experts"}


# **** answers ****


def site_of(stored: Stored, kind: str) -> Site:
    """A site of a kind that uses the weight; nothing can be read of it."""

    def nothing(rows: Rows) -> QuantizedTensor:
        raise NotImplementedError("a weight without bytes")

    matrix = WeightRef(
        *("w", stored.spec, stored.layout, (N, K), nothing, "nowhere: w"),
        activations=stored.activations,
    )
    if kind == "linear":
        return LinearSite("site", matrix)
    if kind == "embedding":
        return EmbeddingSite("site", matrix)
    wide = WeightRef("w", stored.spec, stored.layout, (K, K), nothing, "nowhere: w")
    roles = {"gate": [wide] * _EXPERTS, "up": [wide] * _EXPERTS, "down": [wide] * _EXPERTS}
    return ExpertsSite("site", stack_experts("w", roles, "nowhere"), False, "gated silu")  # type: ignore[arg-type]


def answer(site: Site, target: Target) -> str:
    """What a plan for the target does with the site: one cell of the table."""
    backend = backends.load(target.kind)
    dtype = default_dtype(backend, target)
    kernels = kernels_for(backend, dtype)
    own = [kernel for kernel in kernels if not kernel.name.startswith(_ELSEWHERE)]
    [entry] = select([site], own, target, "error", dtype)
    if entry.kernel is None:
        [rounded] = select([site], own, target, "requantize", dtype)
        after = ", runs requantized" if rounded.requantized else ""
        return f"refused ({_reason(entry)}){after}"
    loss = "~" if entry.route is not None and entry.route.error else ""
    return f"`{entry.kernel.name}`{loss}{_beside(site, kernels, target, dtype)}"


def _beside(site: Site, kernels: Sequence[Kernel], target: Target, dtype: torch.dtype) -> str:
    """Kernels of packages that would take the site where they are installed."""
    others = [k for k in kernels if k.name.startswith(_ELSEWHERE[0])]
    [entry] = select([site], others, target, "error", dtype)
    names = [
        f"`{verdict.kernel}`"
        for verdict in entry.verdicts
        if verdict.cost is not None or "package" in verdict.text
    ]
    return f", or {' or '.join(names)}" if names else ""


def _reason(entry: Entry) -> str:
    """Why most of the kernels refuse; of those without an edge only where all are."""
    texts = [_short(verdict.text) for verdict in entry.verdicts]
    told = Counter(text for text in texts if text != _NO_EDGE) or Counter(texts)
    most = max(told.values())
    return "; ".join(text for text, count in told.items() if count == most)


def _short(text: str) -> str:
    """A refusal without what it found in this very weight."""
    if text.startswith("no edge leads"):
        return _NO_EDGE
    return re.sub(r"; [^;]* \([^()]*\)$", "", text)


# **** tables ****


def section(scheme: str) -> str:
    """The tables of one scheme as Markdown."""
    for name in STORED:
        schemes.scheme_of(name)  # registers its layouts
    stored = STORED[scheme]()
    reasons: list[str] = []
    tables = [_table(stored, kind, reasons) for kind in _KINDS]
    notes = "\n".join(f"{i}. {reason}" for i, reason in enumerate(reasons, 1))
    return "\n\n".join([*tables, *([f"Refusals:\n\n{notes}"] if notes else [])])


def _table(stored: Sequence[Stored], kind: str, reasons: list[str]) -> str:
    """One kind of site: weights with the same answers share a row, targets a column."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for one in stored:
        site = site_of(one, kind)
        cells = tuple(_cell(answer(site, Target.parse(t)), reasons) for t in TARGETS)
        rows.setdefault(cells, []).append(one.label)
    columns = list(_columns(list(rows)))
    heads = [f"`{'`, `'.join(TARGETS[i] for i in column)}`" for column in columns]
    lines = [f"| {_KINDS[kind]}: weights | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for cells, labels in rows.items():
        shown = " | ".join(cells[column[0]] for column in columns)
        lines.append(f"| {_joined(labels)} | {shown} |")
    return "\n".join(lines)


def _joined(labels: Iterable[str]) -> str:
    """Labels in a few words: those that differ in their width share the rest.

    >>> _joined(["2 bits symmetric", "`q4_k`", "4 bits symmetric", "`q5_k`"])
    '2, 4 bits symmetric; `q4_k`, `q5_k`'
    """
    rest: dict[str, list[str]] = {}
    for label in labels:
        width, space, tail = label.partition(" ")
        known = bool(space) and width.isdigit()
        rest.setdefault(tail if known else "" if label[0] == "`" else label, []).append(
            width if known else label
        )
    return "; ".join(
        f"{', '.join(found)} {tail}".strip() if found != [tail] else tail
        for tail, found in rest.items()
    )


def _columns(rows: Sequence[tuple[str, ...]]) -> Iterator[list[int]]:
    """Runs of targets of one kind that answer alike in every row."""
    run: list[int] = []
    for i, target in enumerate(TARGETS):
        kind = target.partition(":")[0]
        same = run and TARGETS[run[0]].partition(":")[0] == kind
        if run and not (same and all(row[run[0]] == row[i] for row in rows)):
            yield run
            run = []
        run.append(i)
    yield run


def _cell(text: str, reasons: list[str]) -> str:
    """An answer; a refusal's reason becomes its number."""
    found = re.fullmatch(r"refused \((.*)\)(.*)", text)
    if found is None:
        return text
    if found[1] not in reasons:
        reasons.append(found[1])
    return f"refused ({reasons.index(found[1]) + 1}){found[2]}"


def between(scheme: str) -> re.Pattern[str]:
    """Finds a scheme's tables in the page, with the markers around them."""
    return re.compile(f"(<!-- support: {scheme} -->\n).*?(\n<!-- end -->)", re.DOTALL)


def rewritten(page: str) -> str:
    """The page with fresh tables.

    Raises:
        OptionError: the page has no place for a scheme, or no compiler is here, without which the
            CPU kernels refuse everything.
    """
    if backends.load("cpu").compiler() == "eager":
        raise OptionError("the CPU", "no C++ compiler", "one, as the tables assume", "install one")
    for scheme in STORED:
        pattern = between(scheme)
        if not pattern.search(page):
            raise OptionError(
                str(PAGE),
                f"no place for the scheme {scheme}",
                f"the lines <!-- support: {scheme} --> and <!-- end -->",
                "add them to its section",
            )
        text = section(scheme)
        page = pattern.sub(lambda found, text=text: f"{found[1]}\n{text}\n{found[2]}", page)  # type: ignore[misc]
    return page


def main(arguments: Sequence[str]) -> int:
    """Print the tables, or write them into the page."""
    try:
        if list(arguments) == ["--write"]:
            PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
            say(f"wrote {PAGE}")
        elif arguments:
            raise OptionError(" ".join(arguments), "unknown", "--write, or nothing", COMMAND)
        else:
            print("\n\n".join(f"## {name}\n\n{section(name)}" for name in STORED))
    except QCompileError as error:
        say(f"{type(error).__name__}: {error}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
