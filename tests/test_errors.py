"""Every error has four parts, says them, and survives a process boundary."""

from __future__ import annotations

import ast
import pickle
from pathlib import Path

import pytest

import qcompile
from qcompile.errors import OptionError, QCompileError, nearest

ROOT = Path(__file__).resolve().parents[1]
FAMILY = {
    name: getattr(qcompile, name)
    for name in qcompile.__all__
    if isinstance(getattr(qcompile, name), type)
    and issubclass(getattr(qcompile, name), QCompileError)
}


@pytest.mark.parametrize("cls", FAMILY.values(), ids=FAMILY)
def test_the_message_has_every_part(cls: type[QCompileError]) -> None:
    error = cls("here", "this", "that", "do so", reasons=["because", "and because"])
    assert str(error) == ("here: this\n  because\n  and because\n  needed  that\n  fix     do so")
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is cls
    assert str(back) == str(error)
    assert (back.where, back.found, back.needed, back.fix) == ("here", "this", "that", "do so")
    assert back.reasons == ("because", "and because")


def test_the_family() -> None:
    assert len(FAMILY) == 9
    assert issubclass(OptionError, ValueError)


def test_a_hint_for_a_mistyped_word() -> None:
    assert nearest("ggfu", ["gguf", "gptq"]) == " (did you mean 'gguf'?)"
    assert nearest("zzz", ["gguf", "gptq"]) == ""
    assert nearest("x", []) == ""


def raised() -> list[tuple[str, ast.Call]]:
    """Every place that makes one of these errors."""
    found = []
    folders = (ROOT / name for name in ("qcompile", "passes", "backends"))
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in FAMILY:
                found.append((f"{path.relative_to(ROOT)}:{node.lineno}", node))
    return found


def test_every_error_in_the_tree_fills_its_four_parts() -> None:
    places = raised()
    assert len(places) > 50
    for place, call in places:
        parts = [*call.args, *(k.value for k in call.keywords if k.arg != "reasons")]
        assert len(parts) == 4 or any(isinstance(p, ast.Starred) for p in parts), place
        empty = [p for p in parts if isinstance(p, ast.Constant) and not p.value]
        assert not empty, place
