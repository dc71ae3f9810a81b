"""What the README and the pages show runs as it stands, and their links lead somewhere.

The Python blocks of a page are one program, run from top to bottom in a folder that holds files of
the names they use; console blocks print what they show; every option of the command line that is
mentioned exists. The recipes have a test of their own.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.artifacts import gguf_model
from support.blocks import HIDDEN
from support.markdown import RECIPES, blocks, environment, run
from support.small import write_module
from support.zoo import DATA, ROOT, gemma
from torch import nn

from qcompile.cli.parser import parser

DOCS = [
    page
    for page in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").glob("*.md")),
    )
    if page.stem not in RECIPES
]
GEMMA = "gemma-3-270m-q4_k_m.gguf"
# What a page's reader has already: a module of their own, and imports that go without saying.
PREAMBLE = f"""
import qcompile.backends.cpu
qcompile.backends.cpu.compiler = lambda: "eager"  # Inductor would take minutes
from torch import nn
from support.blocks import Looping as MyBlock
MyModel = lambda: nn.Sequential(nn.Linear({HIDDEN}, 64), nn.ReLU(), nn.Linear(64, {HIDDEN}))
"""
# A block must leave its model usable.
CLOSING = f"""
import torch
if "compiled" in globals():
    x = torch.randn(2, {HIDDEN})
    assert torch.allclose(compiled(x), module(x), rtol=1e-3, atol=1e-5)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that pages name."""
    from transformers import AutoConfig, LlamaForCausalLM

    base = tmp_path_factory.mktemp("snippets")
    work = base / "work"
    work.mkdir()
    shutil.copy(DATA / "gguf-q2_k.gguf", work / "model.gguf")
    gguf_model(work / "small.gguf", "llama", {"attn_q.weight": "Q8_0", "ffn_up.weight": "Q4_0"})
    torch.manual_seed(0)
    mine = nn.Sequential(nn.Linear(HIDDEN, 64), nn.ReLU(), nn.Linear(64, HIDDEN))
    write_module(work / "mine.gguf", mine, {}, "Q8_0")
    config = AutoConfig.from_pretrained(str(DATA / "gptq-w2-g32-asym"), num_hidden_layers=1)
    del config.quantization_config
    LlamaForCausalLM(config).save_pretrained(work / "float-folder")
    return base


@pytest.mark.parametrize("page", DOCS, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_run(page: Path, folder: Path) -> None:
    shown = [block for block in blocks(page) if block.language == "python"]
    if not shown:
        pytest.skip("no Python on this page")
    for made in ("quantized-folder", "saved"):
        shutil.rmtree(folder / "work" / made, ignore_errors=True)
    program = "\n".join([PREAMBLE, *(block.text for block in shown), CLOSING])
    environ = environment(folder)
    environ["PYTHONPATH"] += f":{ROOT / 'tests'}"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder / "work",
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, f"{shown[0].page}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("page", DOCS, ids=lambda page: str(page.relative_to(ROOT)))
def test_console_blocks_print_what_they_show(page: Path, folder: Path) -> None:
    shown = [block for block in blocks(page) if block.language == "console"]
    if not shown:
        pytest.skip("no console on this page")
    for block in shown:
        place = folder / "work" / GEMMA
        if GEMMA in block.text and not place.exists():
            place.symlink_to(gemma())
        run(block, folder)


def _commands(
    command: argparse.ArgumentParser, path: tuple[str, ...] = ()
) -> dict[tuple[str, ...], set[str]]:
    """The options of a command and of all below it."""
    found = {path: {name for action in command._actions for name in action.option_strings}}
    for action in command._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                found |= _commands(below, (*path, name))
    return found


@pytest.mark.parametrize("page", DOCS, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_options_exist(page: Path) -> None:
    known = _commands(parser())
    names = {path[0] for path in known if path}
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in re.findall(r"(?:^|`|\$ |&& )qcompile ([^`\n]*)", text, re.MULTILINE):
        if line.split()[0].endswith(":"):  # what it logs
            continue
        words = re.findall(r"[\w-]+", line.split("|")[0].split(" # ")[0])
        assert words[0] in {*names, "COMMAND"}, f"{page.name}: qcompile {line}"
        path = max((p for p in known if tuple(words[: len(p)]) == p), key=len)
        used = {word for word in words if word.startswith("--")}
        assert used <= known[path] or words[0] == "COMMAND", f"{page.name}: qcompile {line}"


@pytest.mark.parametrize(
    "page",
    [*DOCS, *(ROOT / "docs" / f"{name}.md" for name in RECIPES)],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for link in re.findall(r"\]\(([^)]+)\)", text):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        if anchor:
            heads = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in heads}
