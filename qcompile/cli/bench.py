"""``qcompile bench``: figures of kernels.

Comes in: arguments. Goes out: a table.
Always holds: it says that nothing was timed.
"""

from __future__ import annotations

import argparse

from qcompile.errors import OptionError


def run_bench(arguments: argparse.Namespace) -> int:
    """Print the figures of kernels that are compiled ahead of time; 1 where a rule is broken."""
    if not arguments.aot:
        raise OptionError(
            "qcompile bench kernels",
            "no --aot",
            "--aot: kernels are compiled here, and timed only by a script of their own",
            "add --aot, or run python -m qcompile.bench.linear to time those of this CPU",
        )
    from qcompile.bench.kernels import report

    return report(arguments.arch or (), arguments.only, arguments.json)
