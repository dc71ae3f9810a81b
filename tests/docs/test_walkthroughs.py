"""The recipes work as they stand: their files are written and their commands run, in order.

The examples are packages of their own in an empty folder. ``pip install`` is the real one, offline,
into a folder that only these processes see.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.markdown import RECIPES, blocks, run
from support.zoo import ROOT


@pytest.mark.parametrize("name", RECIPES)
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
