"""The recipes work as they stand: their files are written and their commands run, in order.

The examples are packages of their own in an empty folder. ``pip install`` is the real one, offline,
into a folder that only these processes see.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.markdown import Block, blocks, commands, same
from support.zoo import ROOT

PAGES = ("adding-a-scheme", "adding-a-kernel", "adding-a-pass")


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
            timeout=300,
        )
        where = f"{block.page}: $ {command.line}"
        assert same(command.prints, done.stdout), f"{where}\n{done.stdout}"


@pytest.mark.parametrize("name", PAGES)
def test_a_reader_who_follows_the_page(name: str, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    done = {"file": 0, "console": 0}
    for block in blocks(ROOT / "docs" / f"{name}.md"):
        if block.role.startswith("file: "):
            path = tmp_path / "work" / block.role.removeprefix("file: ")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
            done["file"] += 1
        else:
            assert block.language == "console", f"{block.page}: neither a file nor a command"
            run(block, tmp_path)
            done["console"] += 1
    assert min(done.values()) >= 3
