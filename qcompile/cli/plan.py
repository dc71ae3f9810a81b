"""``qcompile plan``: as a table, as JSON, as a web page, or one site.

Comes in: a checkpoint's path. Goes out: text or JSON on stdout, or a page in a file.
Always holds: without ``--verify`` no weight is read; a page is written even when sites fail to
verify, and the failure is told after it; text from a file is printed with its control characters
escaped.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import qcompile
from qcompile.cli.screen import painter, say, width
from qcompile.errors import OptionError, VerifyError
from qcompile.plan_table import wrapped
from qcompile.plan_text import size_text
from qcompile.plans import Plan
from qcompile.progress import reporter
from qcompile.session import no_progress
from qcompile.verify import SiteError, verify_session
from qcompile.visible import visible

_SHOWN = 5


def run_plan(arguments: argparse.Namespace) -> int:
    """Print the plan in the form that was asked for."""
    plan = qcompile.plan(
        arguments.file,
        arguments.device,
        arguments.scheme,
        on_unsupported=arguments.on_unsupported,
        numerics=arguments.numerics,
    )
    errors: tuple[SiteError, ...] = ()
    failure: VerifyError | None = None
    if arguments.emulate and not arguments.verify:
        raise OptionError(
            "--emulate", "nothing runs", "--verify, which runs every site", "add --verify"
        )
    if arguments.verify:
        plan, errors, failure = _verified(plan, arguments)
    if arguments.html:
        _write(arguments.html, plan.to_html(errors))
    if arguments.explain:
        print("\n".join(_explained(plan, arguments.explain, width())))
    elif arguments.json:
        print(plan.to_json(errors))
    elif not arguments.html:
        print("\n".join([plan.text(width(), painter()), *_worst(errors)]))
    if failure is not None:
        sys.stdout.flush()
        raise failure
    return 0


def _explained(plan: Plan, site: str, limit: int | None) -> list[str]:
    """Every kernel's verdict on a site, continued under the kernel's name."""
    lines: list[str] = []
    for line in plan.explain(site).splitlines():
        indent = " " * (len(line) - len(line.lstrip()))
        lines += wrapped(indent, " " * 6, visible(line.lstrip()), limit)
    return lines


def _verified(
    plan: Plan, arguments: argparse.Namespace
) -> tuple[Plan, tuple[SiteError, ...], VerifyError | None]:
    """The plan with what packing measured, and the error of every site, worst first."""
    from qcompile.prepare import session_of

    session = session_of(
        plan,
        policy=arguments.on_unsupported,
        emulate=arguments.emulate,
        progress=reporter("bar") if sys.stderr.isatty() else no_progress,
    )
    try:
        verify_session(session)
    except VerifyError as failure:
        return session.plan, session.verification, failure
    return session.plan, session.verification, None


def _worst(errors: Sequence[SiteError]) -> list[str]:
    if not errors:
        return []
    shown = [f"    {visible(str(error))}" for error in errors[:_SHOWN]]
    return [f"  verified {len(errors)} sites against the reference; the worst:", *shown]


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionError(
            f"--html {path}",
            error.strerror or str(error),
            "a file that can be written",
            "name another file",
        ) from None
    say(f"wrote {path} ({size_text(len(text.encode()))})")
