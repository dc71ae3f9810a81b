"""``qcompile generate --chat``."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.templates import FILE, with_template

import qcompile
from qcompile.cli import main

CHAT = (
    "{% for m in messages %}{% if m.role == 'system' and 'never' in m.content %}"
    "{{ raise_exception('no such role') }}{% endif %}"
    "[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
OPTIONS = ("--chat", "--tokens", "6", "--emitter", "eager")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_template(tmp_path_factory.mktemp("chat") / "model.gguf", CHAT)


@pytest.fixture(scope="module")
def answer() -> Callable[[str], str]:
    """What the model says after a text, by ``generate`` of transformers."""
    torch._dynamo.reset()
    loaded: Any = qcompile.load(FILE, emitter="eager")
    model, tokenizer = loaded

    def continued(text: str) -> str:
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        made = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
        said: str = tokenizer.decode(made, skip_special_tokens=True)
        return said

    return continued


def lines(monkeypatch: pytest.MonkeyPatch, *said: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(said)))


def test_one_question(
    file: Path, answer: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    question = ("--prompt", "Why?", "--system", "Be brief.", "--json")
    assert main(["generate", str(file), *OPTIONS, *question]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert (found["prompt"], found["system"]) == ("Why?", "Be brief.")
    assert found["text"] == answer("[system] Be brief.\n[user] Why?\n[assistant]")
    assert found["prompt_tokens"] > 5
    assert "\ndecode " in said.err


def test_a_conversation(
    file: Path,
    answer: Callable[[str], str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = answer("[user] Why?\n[assistant]")
    second = answer(f"[user] Why?\n[assistant] {first}\n[user] And then?\n[assistant]")
    lines(monkeypatch, "Why?", "", "  And then?  ")
    assert main(["generate", str(file), *OPTIONS]) == 0
    assert capsys.readouterr().out == f"{first}\n{second}\n"


def test_a_conversation_as_json(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines(monkeypatch, "Why?", "And then?")
    assert main(["generate", str(file), *OPTIONS, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [m["role"] for m in found["messages"]] == ["user", "assistant"] * 2
    assert len(found["turns"]) == 2


def test_what_is_typed(tmp_path: Path) -> None:
    """On a terminal: a prompt before each line, and Ctrl-D ends it."""
    ours, theirs = pty.openpty()
    code = "from qcompile.cli.chat import questions; print([*questions()])"
    with (tmp_path / "told").open("w") as told:
        command = [sys.executable, "-c", code]
        process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=told)
    try:
        for typed in (b"Why?\n", b"\n", b" And then?\n"):
            read_until(ours, "> ")
            os.write(ours, typed)
        read_until(ours, "> ")
        os.write(ours, b"\x04")
        assert "['Why?', 'And then?']" in read_until(ours, "]")
        assert process.wait(60) == 0
    finally:
        process.kill()
        os.close(theirs)
        os.close(ours)
    assert "Ctrl-D" in (tmp_path / "told").read_text()


def read_until(terminal: int, mark: str) -> str:
    """What a terminal shows, up to a mark; for a minute at most."""
    shown, end = b"", time.monotonic() + 60
    while mark.encode() not in shown.replace(b"\r", b""):
        ready, _, _ = select.select([terminal], [], [], max(0.0, end - time.monotonic()))
        assert ready, f"nothing more after {shown!r}"
        shown += os.read(terminal, 1 << 12)
    return shown.decode(errors="replace")


@pytest.mark.parametrize(
    ("arguments", "said", "match"),
    [
        (("--chat",), (), "no question"),
        (("--chat", "--prompt", " "), (), "empty"),
        (("--chat", "--prompt", "x", "--system", "never"), (), "no such role"),
        (("--chat", "--prompt", "x", "--tokens", "100000"), (), "positions"),
        (("--prompt", "x", "--system", "y"), (), "without --chat"),
        ((), (), "no --prompt"),
    ],
)
def test_refused(
    file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    said: tuple[str, ...],
    match: str,
) -> None:
    lines(monkeypatch, *said)
    assert main(["generate", str(file), "--emitter", "eager", *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert match in told.err
    assert [line.split()[0] for line in told.err.splitlines()[-2:]] == ["needed", "fix"]


def test_a_checkpoint_without_a_template(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(FILE), *OPTIONS, "--prompt", "x"]) == 2
    assert "no chat template" in capsys.readouterr().err
