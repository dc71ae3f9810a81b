"""``qcompile export``, and ``qcompile generate`` on what it made."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.templates import with_template
from support.zoo import DATA

from qcompile.cli import main
from qcompile.cli.saved import _DECIDED

# Rendered by the chat tests as it is; the model has no template of its own.
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
RUN = ("--prompt", "Once", "--tokens", "8")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_template(tmp_path_factory.mktemp("source") / "small.gguf", TEMPLATE)


@dataclass(frozen=True)
class Exported:
    """A folder, and what the command said of it."""

    folder: Path
    facts: dict[str, Any]
    steps: list[str]


@pytest.fixture(scope="module")
def exported(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    place = tmp_path_factory.mktemp("saved") / "artifact"
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert main(["export", str(source), str(place), "--context", "512", "--json"]) == 0
    steps = [line.partition(" s  ")[2] for line in err.getvalue().splitlines()]
    return Exported(place, json.loads(out.getvalue()), [step for step in steps if step])


@pytest.fixture
def saved(exported: Exported) -> Path:
    return exported.folder


def test_the_steps_are_named(exported: Exported) -> None:
    assert exported.steps[0] == "loading and packing the weights"
    assert exported.steps[-1] == "checking what was written"


def test_json_says_what_was_made(exported: Exported) -> None:
    facts = exported.facts
    assert (facts["context"], facts["dtype"], facts["numerics"]) == (512, "float32", "exact")
    assert facts["path"] == str(exported.folder)
    assert facts["bytes"] > facts["weight_bytes"] > 0
    assert facts["error"] < 1e-3


def test_it_says_what_the_checkpoint_says(
    source: Path, saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(source), *RUN, "--emitter", "eager"]) == 0
    expected = capsys.readouterr().out
    assert main(["generate", str(saved), *RUN]) == 0
    said = capsys.readouterr()
    assert said.out == expected
    assert "context 512" in said.err
    assert "compiling 0.0 s (0 graphs)" in said.err
    assert main(["generate", str(saved), *RUN, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["tokens"], found["emitter"]) == (8, "ahead of time")
    assert (found["prompt"] + found["text"]).strip() == expected.strip()


def test_it_chats(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(saved), "--chat", *RUN, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "Once"


def test_a_conversation_that_does_not_fit(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(saved), "--chat", "--prompt", "Once", "--tokens", "512"]) == 2
    assert "512 at most" in capsys.readouterr().err


GIVEN = {
    "device": ("--device", "npu:910b"),
    "scheme": ("--scheme", "gguf"),
    "on_unsupported": ("--on-unsupported", "dequantize"),
    "numerics": ("--numerics", "fast"),
    "emulate": ("--emulate",),
    "dtype": ("--dtype", "float32"),
    "emitter": ("--emitter", "eager"),
    "verify": ("--verify",),
}


# What an option says when nobody gives it may not be what the export has decided.
USUAL = (
    ("--device", "cpu"),
    ("--scheme", "auto"),
    ("--on-unsupported", "error"),
    ("--numerics", "exact"),
)


def test_every_decided_option_is_tried() -> None:
    assert set(GIVEN) == set(_DECIDED)


@pytest.mark.parametrize("given", [*GIVEN.values(), *USUAL], ids=" ".join)
def test_what_was_decided_is_no_option(
    saved: Path, capsys: pytest.CaptureFixture[str], given: tuple[str, ...]
) -> None:
    assert main(["generate", str(saved), *RUN, *given]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"OptionError: {given[0]}: {saved} is an artifact")


@pytest.mark.parametrize("command", ["plan", "inspect"])
def test_an_artifact_is_no_checkpoint(
    saved: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert main([command, str(saved)]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"SchemeError: {saved}: a saved compilation")
    assert "qcompile generate PATH" in said.err


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--context", "16"), "context=16"),
        (("--device", "npu:910b"), "its code cannot be saved"),
        (("--dtype", "int8"), "--dtype int8"),
    ],
)
def test_refusals_leave_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], told: str
) -> None:
    assert main(["export", str(DATA / "gguf-q2_k.gguf"), str(tmp_path / "out"), *options]) == 2
    assert told in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
