"""The programs in ``examples/`` run as their first lines say, without a network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.zoo import DATA, ROOT

EXAMPLES = ROOT / "examples"
GGUF = DATA / "gguf-q2_k.gguf"


def run(name: str, *arguments: object) -> str:
    """What an example prints."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("checkpoint", [GGUF, DATA / "gptq-w2-g32-asym"], ids=["file", "folder"])
def test_generate(checkpoint: Path) -> None:
    options = ("--tokens", 4, "--emitter", "eager")
    assert run("generate.py", checkpoint, "def main", *options).startswith("def main")


def test_quantize(tmp_path: Path) -> None:
    from transformers import AutoConfig, LlamaForCausalLM

    source, dest = tmp_path / "float", tmp_path / "quantized"
    folder = DATA / "gptq-w2-g32-asym"
    config = AutoConfig.from_pretrained(str(folder), num_hidden_layers=1)
    del config.quantization_config
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(source)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, source / name)
    text = tmp_path / "text.txt"
    text.write_text((ROOT / "qcompile" / "api.py").read_text(encoding="utf-8")[:4000])
    said = run("quantize.py", source, dest, "--text", text, "--group-size", 64, "--tokens", 64)
    assert "all sites" in said
    assert f"wrote {dest}: " in said
    assert said.rstrip().endswith("bytes, 7 sites")


def test_plan_for_devices() -> None:
    targets = ("cpu:avx2", "cuda:sm90", "npu:910b", "npu:310p")
    said = run("plan_for_devices.py", GGUF, *targets)
    assert [line.split()[0] for line in said.splitlines() if line[0] != " "] == list(targets)
    assert "29 sites without a kernel" in said


def test_own_module() -> None:
    said = run("own_module.py")
    assert "q4_0  [1000 x 256]" in said
    assert float(said.split()[-1]) < 1e-5


def test_own_experts() -> None:
    said = run("own_experts.py")
    assert "experts" in said
    assert 1e-4 < float(said.split()[-1]) < 2e-2


def test_every_example_is_run() -> None:
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names - tested - {"server"} == set()
