"""The command line.

Comes in: arguments. Goes out: text on stdout and an exit code.
Always holds: an error is one message on stderr that starts with the name of its class, and exit
code 2; a traceback appears only with ``--debug``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from qcompile.cli.parser import parser
from qcompile.errors import QCompileError, SchemeError
from qcompile.visible import visible


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    given = sys.argv[1:] if argv is None else argv
    try:
        arguments = parser().parse_args(given)
        code = int(arguments.run(arguments))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Python flushes once more at exit, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (QCompileError, OSError) as error:
        if "--debug" in given:
            raise
        known = error if isinstance(error, QCompileError) else _refused_by_system(error)
        print(visible(f"{type(known).__name__}: {known}"), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _refused_by_system(error: OSError) -> QCompileError:
    return SchemeError(
        str(error.filename or "the system"),
        error.strerror or str(error),
        "a file that can be read",
        "check the path and its permissions",
    )
