"""The command line: what it prints, and that every error is one message and exit code 2."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
from support.gguf_bytes import STRING, gguf, key, tensor, text
from support.templates import with_template
from support.zoo import DATA, ROOT

from qcompile import verify
from qcompile.cli import main
from qcompile.errors import OptionError, SchemeError
from qcompile.plans import Entry
from qcompile.session import Session

FILE = DATA / "gguf-q2_k.gguf"
TEMPLATE = "{{ raise_exception('rendered') }}{% for x in range(10**9) %}\x1b[31m{% endfor %}"


def fails(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The message of a command that must fail: one, of four parts, and nothing on stdout."""
    code = main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    assert code == 2
    assert said.out == ""
    first, *rest = said.err.splitlines()
    assert first.split(": ")[0] in ("OptionError", "SchemeError", "PlanError")
    assert len(first.split(": ")) >= 3
    assert all(line.startswith("  ") for line in rest)
    assert [line.split()[0] for line in rest[-2:]] == ["needed", "fix"]
    assert "Traceback" not in said.err
    return said.err


def test_plan_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(FILE), "--device", "cpu:avx2"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert "  model.layers.0-3  4 layers\n" in said.out
    assert "    self_attn.q_proj  linear " in said.out
    assert "scheme gguf  target cpu:avx2" in said.out
    assert "no kernel" not in said.out


@pytest.mark.parametrize("device", ["cuda:sm90", "cuda"])
def test_plan_says_which_packages_miss(capsys: pytest.CaptureFixture[str], device: str) -> None:
    assert main(["plan", str(FILE), "--device", device, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["target"] == device
    assert len(content["sites"]) == 30
    for site in content["sites"]:
        assert main(["plan", str(FILE), "--device", device, "--explain", site["site"]]) == 0
        said = capsys.readouterr().out
        if site["kind"] == "linear":
            assert "package humming-kernels is not installed" in said


def test_plan_quotes_what_a_kernel_needs(capsys: pytest.CaptureFixture[str]) -> None:
    device = "npu:310p"
    assert main(["plan", str(FILE), "--device", device, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["target"] == device
    refused = [site for site in content["sites"] if site["runs_as"] == "no kernel"]
    assert len(refused) == 29
    for site in refused:
        assert main(["plan", str(FILE), "--device", device, "--explain", site["site"]]) == 0
        said = capsys.readouterr().out
        assert "a multiple of 32 from 32 to K - 1; the group is 16, K is" in said


def test_generate_under_emulation(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--device", "npu:310p", "--on-unsupported", "requantize", "--emulate")
    assert main(["generate", str(FILE), "--prompt", "def", "--tokens", "2", *options]) == 0
    said = capsys.readouterr()
    assert "emulated on the CPU" in said.err
    assert "29 sites requantized to 8 bits: measured when packed" in said.err
    assert said.out.startswith("def")


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_a_plan_fits_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for device in ("cpu:avx2", "npu:310p"):
        assert main(["plan", str(FILE), "--device", device]) == 0
        title, *lines = capsys.readouterr().out.splitlines()
        assert title.startswith("plan  ")
        assert max(map(len, lines)) <= columns
        assert any("self_attn.q_proj" in line for line in lines)


def test_colours_are_for_terminals(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def printed() -> str:
        assert main(["plan", str(FILE), "--device", "npu:310p"]) == 0
        return capsys.readouterr().out

    assert "\x1b" not in printed()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = printed()
    assert "\x1b[31mno kernel" in coloured
    monkeypatch.setenv("NO_COLOR", "1")
    assert printed() == re.sub(r"\x1b\[\d+m", "", coloured)
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in printed()


def test_a_plan_as_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    assert main(["plan", str(FILE), "--html", str(page)]) == 0
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"wrote {page} (")
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert main(["plan", str(FILE), "--html", str(page), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["sites"]) == 30
    assert "No such file" in fails(capsys, "plan", FILE, "--html", tmp_path / "no" / "plan.html")


def test_a_verified_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    assert main(["plan", str(FILE), "--verify"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert "verified 30 sites against the reference; the worst:\n    " in said.out
    assert main(["plan", str(FILE), "--verify", "--json", "--html", str(page)]) == 0
    errors = [site["verified"] for site in json.loads(capsys.readouterr().out)["sites"]]
    assert len(errors) == 30
    assert all(error["relative_l2"] <= error["allowed"] < 1e-5 for error in errors)
    assert "verified 30 sites, worst error" in page.read_text(encoding="utf-8")
    npu = ("--device", "npu:310p", "--on-unsupported", "requantize", "--emulate")
    assert main(["plan", str(FILE), *npu, "--verify"]) == 0
    said = capsys.readouterr()
    assert "emulated on the CPU" in said.out
    assert "29 sites requantized to 8 bits: worst relative L2 error" in said.out


def test_a_plan_that_fails_to_verify_is_shown_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = verify.verify_entry

    def wrong(entry: Entry, session: Session) -> verify.SiteError:
        found = measure(entry, session)
        return replace(found, relative_l2=0.5) if entry.site.name == "lm_head" else found

    monkeypatch.setattr(verify, "verify_entry", wrong)
    page = tmp_path / "plan.html"
    assert main(["plan", str(FILE), "--verify", "--html", str(page)]) == 2
    said = capsys.readouterr()
    assert "VerifyError: lm_head" in said.err
    assert "1 beyond what is allowed" in page.read_text(encoding="utf-8")


def test_plan_explains_by_any_name(capsys: pytest.CaptureFixture[str]) -> None:
    names = ("model.layers.1.mlp.up_proj", "blk.1.ffn_up.weight", "blk.1.ffn_up")
    texts = []
    for name in names:
        assert main(["plan", str(FILE), "--device", "cpu:avx2", "--explain", name]) == 0
        texts.append(capsys.readouterr().out)
    assert len(set(texts)) == 1
    assert "[x] cpu.panel_linear" in texts[0]
    assert "reference.linear" in texts[0]


def test_inspect(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(FILE)]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert "general.architecture = 'llama'" in said.out
    assert "blk.3.attn_v.weight" in said.out
    assert main(["inspect", str(FILE), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["scheme"] == "gguf"
    assert {"name": "blk.0.attn_q.weight", "spec": "q2_k", "shape": [256, 256], "bytes": 21504} in (
        content["tensors"]
    )


def forbid_templates(monkeypatch: pytest.MonkeyPatch) -> None:
    import jinja2

    def refuse(*given: object, **more: object) -> NoReturn:
        raise AssertionError("a chat template was compiled")

    monkeypatch.setattr(jinja2.Environment, "compile", refuse)


def test_generate_streams_and_renders_no_template(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_templates(monkeypatch)
    path = with_template(tmp_path / "template.gguf", TEMPLATE)
    options = ("--prompt", "Once", "--tokens", "3", "--emitter", "eager", "--verify")
    assert main(["generate", str(path), *options]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("Once")
    assert "verified 30 sites" in said.err
    for word in ("load", "prefill", "decode", "memory"):
        assert f"\n{word} " in said.err


def test_generate_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--prompt", "Once", "--tokens", "4", "--emitter", "eager")
    assert main(["generate", str(FILE), *options]) == 0
    streamed = capsys.readouterr().out
    assert main(["generate", str(FILE), *options, "--json"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert streamed.rstrip("\n") == (found["prompt"] + found["text"]).rstrip("\n")
    assert (found["tokens"], found["emitter"], found["prompt"]) == (4, "eager", "Once")
    assert found["decode_tokens_a_second"] > 0
    assert found["peak_bytes"] > 1 << 20
    assert "\ndecode   " in said.err


def test_what_a_file_says_reaches_the_terminal_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_templates(monkeypatch)
    assert main(["inspect", str(with_template(tmp_path / "template.gguf", TEMPLATE))]) == 0
    said = capsys.readouterr().out
    assert "raise_exception('rendered')" in said
    keys = [
        key("general.architecture", STRING, text("pl\x1b[31main")),
        key("evil\x1b[2J\nkey", STRING, text("\x9b\u202e value")),
        key("tokenizer.chat_template", STRING, text(TEMPLATE)),
    ]
    path = tmp_path / "evil.gguf"
    path.write_bytes(gguf(keys, [tensor("a\x1b[31m\nb.weight", (4, 4), 0, 0)], bytes(64)))
    for arguments in (["inspect"], ["inspect", "--json"], ["plan"], ["plan", "--json"]):
        main([*arguments, str(path)])
        printed = "".join(capsys.readouterr())
        assert printed
        assert all(c.isprintable() or c == "\n" for c in printed), arguments
    main(["inspect", str(path)])
    assert "  a\\x1b[31m\\nb.weight  float32" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["plan", "inspect", "generate"])
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "no such file"),
        (b"", "empty"),
        (b"GGUF", "GGUF"),
        (FILE.read_bytes()[:3000], "bytes"),
        (FILE.read_bytes()[:-4096], "bytes"),
        (b"PK\x03\x04" + bytes(100), "zip"),
        (b"version https://git-lfs.github.com/spec/v1\n", "LFS"),
    ],
)
def test_files_that_are_none(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    content: bytes | None,
    says: str,
) -> None:
    path = tmp_path / "model.gguf"
    if content is not None:
        path.write_bytes(content)
    prompt = ("--prompt", "x") if command == "generate" else ()
    message = fails(capsys, command, path, *prompt)
    assert message.startswith("SchemeError: ")
    assert "model.gguf" in message.splitlines()[0]
    assert says.lower() in message.lower()


def test_a_folder_without_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nothing in it" in fails(capsys, "inspect", tmp_path)
    (tmp_path / "weights.txt").write_bytes(b"1")
    assert "weights.txt" in fails(capsys, "plan", tmp_path)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("plan", FILE, "--device", "tpu"), "one of cpu, cuda, npu"),
        (("plan", FILE, "--device", "npu:911b"), "did you mean '910b'"),
        (("plan", FILE, "--device", "cpu:"), "unknown cpu architecture ''"),
        (("plan", FILE, "--scheme", "ggfu"), "did you mean 'gguf'"),
        (("plan", FILE, "--on-unsupported", "dequantise"), "did you mean 'dequantize'"),
        (("plan", FILE, "--explain", "blk.0.atn_q.weight"), "did you mean 'blk.0.attn_q.weight'"),
        (("plan", FILE, "--bogus"), "--bogus"),
        (("plan", FILE, "--emulate"), "add --verify"),
        (("plan", FILE, "--verify", "--emulate"), "the backend cpu has no emulator"),
        (("plan", FILE, "--verify", "--device", "npu:310p"), "no kernel for 29 of 30"),
        (("plan",), "file"),
        (("inspect", FILE, "--scheme", "x"), "one of auto, auto_round, awq"),
        (("plann", FILE), "plann"),
        ((), "COMMAND"),
        (("generate", FILE), "--prompt"),
        (("generate", FILE, "--prompt", "x", "--tokens", "many"), "many"),
        (("generate", FILE, "--prompt", "x", "--tokens", "0"), "1 or more"),
        (("generate", FILE, "--prompt", "x", "--dtype", "float23"), "did you mean 'float32'"),
        (("generate", FILE, "--prompt", "x", "--emitter", "eagre"), "did you mean 'eager'"),
        (("generate", FILE, "--prompt", "x", "--device", "npu:310p"), "no kernel for 29 of 30"),
    ],
)
def test_options_that_are_none(
    capsys: pytest.CaptureFixture[str], arguments: tuple[object, ...], says: str
) -> None:
    assert says in fails(capsys, *arguments)


def test_an_empty_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(FILE), "--prompt", "", "--emitter", "eager"]) == 2
    assert "OptionError: --prompt '': no tokens" in capsys.readouterr().err


def test_an_error_of_the_system(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: object, **more: object) -> NoReturn:
        raise PermissionError(13, "Permission denied", "model.gguf")

    monkeypatch.setattr("qcompile.open", refuse)
    assert "model.gguf: Permission denied" in fails(capsys, "inspect", FILE)


def test_debug_raises(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SchemeError):
        main(["plan", "nowhere.gguf", "--debug"])
    with pytest.raises(OptionError):
        main(["plan", str(FILE), "--device", "tpu", "--debug"])
    assert capsys.readouterr() == ("", "")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "qcompile", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_process_of_its_own() -> None:
    done = run("plan", "nowhere.gguf")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("SchemeError: nowhere.gguf: ")
    assert "Traceback" not in done.stderr
    shown = run("plan", "nowhere.gguf", "--debug")
    assert shown.returncode != 0
    assert shown.stderr.startswith("Traceback")
    assert "SchemeError: nowhere.gguf: " in shown.stderr


def test_a_reader_that_goes_away() -> None:
    command = f"{sys.executable} -m qcompile inspect {FILE} --json | head -c 1"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "{", "")
