"""Scripts for shells: they are made of the real parser, and the shells here accept them."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.zoo import ROOT

from qcompile.cli import main
from qcompile.cli.parser import parser


def commands() -> list[str]:
    """Every command of the parser."""
    [found] = [a for a in parser()._actions if isinstance(a, argparse._SubParsersAction)]
    return list(found.choices)


COMMANDS = commands()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_takes_its_script(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("shtab")
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    npu = "npu\\:910b npu\\:910_93" if shell == "zsh" else "npu:910b"
    for word in (*COMMANDS, npu, "requantize", "compressed_tensors", "--on-unsupported"):
        assert word in text
    if shutil.which(shell):
        script = tmp_path / "script"
        script.write_text(text, encoding="utf-8")
        done = subprocess.run([shell, "-n", script], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


def completed(folder: Path, *words: str) -> list[str]:
    """What bash offers for the last word."""
    script = folder / "script"
    if not script.exists():
        done = subprocess.run(
            [sys.executable, "-m", "qcompile", "completion", "bash"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        script.write_text(done.stdout, encoding="utf-8")
    line = " ".join(f"'{word}'" for word in ("qcompile", *words))
    code = (
        f"source {script}; COMP_WORDS=({line}); COMP_CWORD={len(words)}; "
        f"_shtab_qcompile '' '{words[-1]}'; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    done = subprocess.run(
        ["bash", "-c", code], cwd=folder, capture_output=True, text=True, check=True
    )
    return sorted(word.strip() for word in done.stdout.split())


def test_bash_completes(tmp_path: Path) -> None:
    pytest.importorskip("shtab")
    (tmp_path / "model.gguf").write_bytes(b"")
    assert completed(tmp_path, "") == sorted(COMMANDS)
    assert completed(tmp_path, "d") == ["demo", "doctor"]
    assert completed(tmp_path, "plan", "--ver") == ["--verify"]
    assert completed(tmp_path, "plan", "--device", "npu:9") == ["npu:910_93", "npu:910b"]
    assert completed(tmp_path, "plan", "mo") == ["model.gguf"]


def test_without_the_package(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert 'pip install "qcompile[completion]"' in capsys.readouterr().err


def shown_examples(text: str) -> list[str]:
    """The examples at the end of a help, each on one line."""
    examples = text.partition("\nexamples:\n")[2].replace("\\\n", "")
    return [line.strip() for line in examples.splitlines()]


def test_every_command_has_help_with_examples(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for command in COMMANDS:
        with pytest.raises(SystemExit) as stopped:
            main([command, "--help"])
        assert stopped.value.code == 0
        text = capsys.readouterr().out
        assert max(map(len, text.splitlines())) <= 80
        examples = shown_examples(text)
        assert examples
        for example in examples:
            assert example.startswith(f"qcompile {command}")


def test_every_example_parses(capsys: pytest.CaptureFixture[str]) -> None:
    made = parser()
    for command in COMMANDS:
        with pytest.raises(SystemExit):
            made.parse_args([command, "--help"])
        for line in shown_examples(capsys.readouterr().out):
            words = shlex.split(line)[1:]
            stop = min([i for i, word in enumerate(words) if word in "|>"], default=len(words))
            assert callable(made.parse_args(words[:stop]).run)


def test_every_command_that_tells_facts_has_json() -> None:
    commands = parts(parser())
    commands |= {f"bench {name}": part for name, part in parts(commands.pop("bench")).items()}
    assert len(commands) == len(COMMANDS) + 4  # bench has five parts
    without = {n for n, c in commands.items() if "--json" not in c._option_string_actions}
    assert without == {"completion"}


def parts(command: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    [found] = [a for a in command._actions if isinstance(a, argparse._SubParsersAction)]
    return dict(found.choices)


def test_the_documentation_lists_every_command() -> None:
    text = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    found = re.findall(r"^\| `qcompile (\w+)", text, re.MULTILINE)
    assert set(found) == set(COMMANDS)
