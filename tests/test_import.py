"""``import qcompile`` is light: torch, and nothing of a vendor."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HEAVY = (
    *("torch_npu", "triton", "transformers", "accelerate", "gguf", "safetensors", "jinja2"),
    *("torch._inductor", "torch._dynamo", "tokenizers", "tqdm.auto"),
)


def modules(statements: str, *arguments: str) -> set[str]:
    """The modules loaded by a fresh interpreter after some statements."""
    code = f"import json, sys\n{statements}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", code, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def plain() -> set[str]:
    return modules("import torch")


def heavy(found: set[str], plain: set[str]) -> set[str]:
    """The heavy packages among modules that torch itself does not load."""
    extra = found - plain
    return {h for h in HEAVY if any(m == h or m.startswith(f"{h}.") for m in extra)}


def test_import(plain: set[str]) -> None:
    found = modules("import qcompile")
    assert not heavy(found, plain)
    assert not {"passes", "backends"} & found
    assert not any(m.startswith(("qcompile.backends.", "qcompile.schemes.gguf")) for m in found)
    own = {m for m in found if m.split(".")[0] == "qcompile"}
    assert len(found - plain - own) < 60
    assert len(own) < 64


def test_a_plan_loads_no_transformers_and_no_vendor(plain: set[str]) -> None:
    file = ROOT / "tests" / "data" / "gguf-q2_k.gguf"
    devices = ("npu:910b", "cuda:sm90", "cpu:avx2")
    plans = "; ".join(f"print(qcompile.plan(sys.argv[1], {device!r}))" for device in devices)
    assert not heavy(modules(f"import qcompile; {plans}", str(file)), plain)


def test_the_face() -> None:
    import qcompile

    assert all(hasattr(qcompile, name) for name in qcompile.__all__)
    assert (Path(str(qcompile.__file__)).parent / "py.typed").exists()
