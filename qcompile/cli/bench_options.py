"""What the benchmarks' options mean, and where their results go.

Comes in: arguments. Goes out: numbers, names and shapes; files.
Always holds: a value that means nothing is an OptionError that names the option; tables go to
stdout, and everything else to stderr.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from qcompile.cli.screen import say
from qcompile.errors import OptionError, nearest
from qcompile.kernel import NUMERICS

Step = Callable[[str], object]


def at_least(given: int | None, usual: int, least: int, option: str) -> int:
    """A number, or the usual one."""
    value = usual if given is None else given
    if value < least:
        raise OptionError(option, str(value), f"{least} or more", "correct the option")
    return value


def numbers(text: str | None, usual: tuple[int, ...], option: str) -> tuple[int, ...]:
    """Numbers of 1 and more, separated by commas."""
    if text is None:
        return usual
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise OptionError(option, text, "numbers like 1,4", "correct the option")
    return tuple(dict.fromkeys(int(part) for part in parts))


def shapes(
    text: str | None, usual: tuple[tuple[int, int], ...], option: str
) -> tuple[tuple[int, int], ...]:
    """Shapes of weights, separated by commas."""
    if text is None:
        return usual
    found = []
    for part in text.split(","):
        sides = part.strip().lower().split("x")
        if len(sides) != 2 or not all(side.isdecimal() and int(side) for side in sides):
            raise OptionError(option, text, "shapes like 4096x14336", "correct the option")
        found.append((int(sides[0]), int(sides[1])))
    return tuple(dict.fromkeys(found))


def words(text: str | None, usual: tuple[str, ...]) -> tuple[str, ...]:
    """Names separated by commas; ``none`` for none."""
    if text is None:
        return usual
    found = tuple(name.strip() for name in text.split(",") if name.strip())
    return () if found == ("none",) else tuple(dict.fromkeys(found))


def allowed_urgency(arguments: argparse.Namespace) -> bool:
    """Whether to measure with real-time priority; an error where that may not be."""
    from qcompile.bench.model_process import may_be_urgent

    if arguments.urgent and not may_be_urgent():
        raise OptionError(
            "--urgent",
            "this process may not have real-time priority",
            "Linux, and the capability CAP_SYS_NICE",
            "leave it out",
        )
    return bool(arguments.urgent)


def need(file: str) -> str:
    """A file or folder that is there."""
    if not Path(file).exists():
        raise OptionError(
            file, "no such file or folder", "a model's folder or file", "check the path"
        )
    return file


def check_saves_code(device: str) -> None:
    """Raise OptionError for a device whose code cannot be saved."""
    from qcompile.backends import SavesCode
    from qcompile.prepare import backend_of

    if not isinstance(backend_of(device)[1], SavesCode):
        raise OptionError(
            "--exported", f"code for {device} cannot be saved", "--device cpu", "leave it out"
        )


def check_numerics(name: str) -> str:
    """The name, if it is one of numerics."""
    if name not in NUMERICS:
        raise OptionError(
            f"--numerics {name}",
            "unknown",
            f"one of {', '.join(NUMERICS)}",
            f"correct the option{nearest(name, NUMERICS)}",
        )
    return name


def refuse(arguments: argparse.Namespace, names: Iterable[str], beside: str) -> None:
    """Raise OptionError where one of some options is given that is not read beside another."""
    for name in names:
        if getattr(arguments, name) not in (None, "", False):
            raise OptionError(
                f"--{name}",
                f"not read {beside}",
                "options that mean something here",
                "leave it out",
            )


def check_places(
    arguments: argparse.Namespace, options: Iterable[str] = ("json", "markdown")
) -> None:
    """Raise OptionError where results could not be written, before anything is measured."""
    for option in options:
        given = getattr(arguments, option)
        if given and (Path(given).is_dir() or not Path(given).absolute().parent.is_dir()):
            raise OptionError(
                f"--{option} {given}",
                "a folder, or a file in a folder that is not there",
                "a file in a folder that is there",
                "make the folder, or correct the path",
            )


@contextmanager
def bar(total: int) -> Iterator[Step]:
    """A progress bar on stderr, where that is a terminal; told before each part."""
    from tqdm import tqdm

    with tqdm(total=total, unit="step", disable=None, leave=False) as shown:

        def step(what: str) -> None:
            shown.set_description_str(what)
            shown.update()

        yield step


def write(
    arguments: argparse.Namespace,
    record: Callable[[], object],
    markdown: Callable[[], str],
    plots: Callable[[str], list[Path]] | None = None,
) -> None:
    """Write what was asked for as JSON, Markdown and pictures, and say where."""
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(record(), indent=1) + "\n", encoding="utf-8")
        say(f"wrote {arguments.json}")
    if arguments.markdown:
        Path(arguments.markdown).write_text(markdown() + "\n", encoding="utf-8")
        say(f"wrote {arguments.markdown}")
    if plots is not None and arguments.plots:
        for path in plots(arguments.plots):
            say(f"wrote {path}")
