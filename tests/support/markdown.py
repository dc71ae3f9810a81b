"""Fenced blocks of a Markdown page, and what their examples print.

A comment before a block says what it is for: ``<!-- file: NAME -->`` writes it to a file. A block
of ``console`` lines that begin with ``$`` is run, the lines below a command are what it prints;
``...`` stands for anything.
"""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from support.zoo import ROOT

# Pages that a test of their own follows from top to bottom.
RECIPES = ("adding-a-scheme", "adding-a-kernel", "adding-a-pass")

_BLOCK = re.compile(
    r"^(?:<!-- (?P<role>[^\n]*?) -->\n)?```(?P<language>[^\n]*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        page: file and line, for messages.
        role: the comment before it, empty where there is none.
        language: the word behind the fence.
        text: what is inside.
    """

    page: str
    role: str
    language: str
    text: str


@dataclass(frozen=True)
class Command:
    """A line of a console block and what it prints."""

    line: str
    prints: str


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    content = page.read_text(encoding="utf-8")
    found = []
    for match in _BLOCK.finditer(content):
        line = content.count("\n", 0, match.start("language")) + 1
        place = f"{page.name}, line {line}"
        found.append(Block(place, match["role"] or "", match["language"].strip(), match["text"]))
    return found


def commands(text: str) -> Iterator[Command]:
    """The commands of a console block; a backslash at the end of a line continues it."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        lines = part.splitlines()
        command = [lines.pop(0)]
        while command[-1].endswith("\\"):
            command.append(lines.pop(0))
        shown = "\n".join(lines).rstrip()
        yield Command("\n".join(command), shown + "\n" if shown else "")


def same(wanted: str, found: str) -> bool:
    """Whether an output is the one that a page shows.

    Spaces at the ends of lines do not count, nor do the numbers that torch gives unknown sizes.
    """
    plain = ["\n".join(line.rstrip() for line in text.splitlines()) for text in (wanted, found)]
    plain = [re.sub(r"\bs\d+\b", "s0", text) for text in plain]
    # doctest would take blank lines for the end of an example; here they are compared.
    return doctest.OutputChecker().check_output(
        plain[0].rstrip() + "\n", plain[1].rstrip() + "\n", doctest.ELLIPSIS
    )


def environment(folder: Path) -> dict[str, str]:
    """What a reader's shell would have, with packages that are installed on the way."""
    scripts = str(Path(sys.executable).parent)
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST")},
        "PATH": os.pathsep.join((scripts, os.environ.get("PATH", ""))),
        "PYTHONPATH": os.pathsep.join((str(folder / "installed"), str(ROOT))),
        "PIP_TARGET": str(folder / "installed"),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }


def run(block: Block, folder: Path) -> None:
    """Run the commands of a block in a folder and compare what they print."""
    for command in commands(block.text):
        line = command.line.replace(
            "pip install .", "pip install --quiet --no-deps --no-index --no-build-isolation ."
        )
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=folder / "work",
            env=environment(folder),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=900,
        )
        where = f"{block.page}: $ {command.line}"
        assert same(command.prints, done.stdout), f"{where}\n{done.stdout}"
