"""What a saved compilation answers: the logits and the texts of the model that it was made from."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.artifacts import Saved, agrees, gguf_model, logits, read, saved, says
from support.llama import llama_config, llama_layers, write_llama
from support.pack_awq import Awq, awq
from support.packers import Packed
from support.zoo import relative_l2

import qcompile
from qcompile.errors import OptionError

NEW = 32
CONTEXT = 640


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Two layers with a window of five tokens, grouped heads, norms of queries and keys."""
    base = tmp_path_factory.mktemp("gemma")
    types = {"token_embd.weight": "Q8_0", "attn_q.weight": "Q8_0", "ffn_up.weight": "Q4_0"}
    file = gguf_model(base / "m.gguf", "gemma3", types, num_hidden_layers=2)
    return saved(file, base / "out", CONTEXT)


def test_logits_of_prompts_of_every_kind(gemma: Saved) -> None:
    for tokens in (1, 2, 8, 9, 10, 40):
        assert agrees(gemma, tokens) < 1e-5, tokens
    assert agrees(gemma, 600) < 1e-5
    assert agrees(gemma, 512) < 1e-5
    assert agrees(gemma, 513) < 1e-5


def test_a_text_in_parts(gemma: Saved) -> None:
    assert agrees(gemma, 10, 1, 3, 9, 1, 20) < 1e-5
    assert agrees(gemma, 1, 520, 2) < 1e-5
    assert agrees(gemma, *[1] * 12) < 1e-5


@pytest.mark.parametrize("tokens", [1, 9, 40])
def test_texts_beyond_the_window(gemma: Saved, tokens: int) -> None:
    ids = gemma.ids(tokens)
    made = gemma.artifact.generate(ids, NEW, ends=False)
    assert made.dtype is torch.int64
    assert made[:tokens].tolist() == ids.tolist()
    assert made[tokens:].tolist() == says(gemma.model, ids, NEW)


def test_the_context_to_its_last_token(gemma: Saved) -> None:
    artifact, ids = gemma.artifact, gemma.ids(CONTEXT)
    expected = logits(gemma.model, ids)
    assert relative_l2(read(artifact, ids, [CONTEXT - 1, 1]), expected[-1]) < 1e-5
    with pytest.raises(OptionError, match=rf"the text: {CONTEXT + 1} tokens[\s\S]*{CONTEXT} at"):
        artifact.read(ids[:1])
    assert artifact.length == CONTEXT
    # The last token that is generated is not read.
    made = artifact.generate(ids[: CONTEXT - 2], 3, ends=False)
    assert made[-3:].tolist() == says(gemma.model, ids[: CONTEXT - 2], 3)
    with pytest.raises(OptionError, match=f"{CONTEXT + 1} tokens"):
        artifact.generate(ids[: CONTEXT - 2], 4)


def test_a_shorter_text_sees_nothing_of_a_longer_one(gemma: Saved) -> None:
    agrees(gemma, 300)
    assert agrees(gemma, 4) < 1e-5
    assert agrees(gemma, 20) < 1e-5
    # Nor does a NaN stay, which masks do not hide.
    gemma.artifact._caches[0].fill_(float("nan"))
    gemma.artifact.length = 30
    assert gemma.artifact.read(gemma.ids(3)).isnan().any()
    assert agrees(gemma, 20) < 1e-5
    assert not any(cache.isnan().any() for cache in gemma.artifact._caches)


def test_forms_of_ids(gemma: Saved) -> None:
    ids, artifact = gemma.ids(20), gemma.artifact
    expected = read(artifact, ids, [20])
    wide = torch.zeros(20, 2, dtype=torch.int64)
    wide[:, 0] = ids
    for same in (ids[None], ids.int(), ids.to(torch.uint8), wide[:, 0]):
        artifact.clear()
        assert torch.equal(artifact.read(same), expected)
    made = artifact.generate(ids, 4, ends=False)
    for same in (ids[None], ids.int(), wide[:, 0]):
        assert torch.equal(artifact.generate(same, 4, ends=False), made)


def test_an_end_ends_a_text(gemma: Saved) -> None:
    ids, artifact = gemma.ids(9), gemma.artifact
    assert artifact.header.ends == (2,)
    choices = iter([5, 7, 2, 9])
    made = artifact.generate(ids, 10, choose=lambda found: next(choices))
    assert made[9:].tolist() == [5, 7, 2]
    choices = iter([5, 7, 2, 9])
    assert artifact.generate(ids, 4, choose=lambda f: next(choices), ends=False).tolist()[-1] == 9


def test_a_stream_is_of_one_text(gemma: Saved) -> None:
    ids, artifact = gemma.ids(9), gemma.artifact
    expected = artifact.generate(ids, 6, ends=False)[9:].tolist()
    assert list(artifact.stream(ids, 6, ends=False)) == expected
    first = artifact.stream(ids, 6, ends=False)
    assert [next(first), next(first)] == expected[:2]
    assert list(artifact.stream(ids, 6, ends=False)) == expected  # the first one is given up
    with pytest.raises(OptionError, match="another text was begun"):
        next(first)
    second = artifact.stream(ids, 6, ends=False)
    next(second)
    artifact.read(ids[:1])
    with pytest.raises(OptionError, match="or more was read"):
        next(second)


def test_threads_are_served_in_turn(gemma: Saved) -> None:
    given = [gemma.ids(tokens) for tokens in (3, 12, 30, 9)]
    expected = [gemma.artifact.generate(ids, NEW, ends=False).tolist() for ids in given]
    found: dict[int, Any] = {}

    def work(number: int) -> None:
        for _ in range(3):
            found[number] = gemma.artifact.generate(given[number], NEW, ends=False).tolist()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(given))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(len(given))] == expected


RUN = """
import json, sys, torch, qcompile
artifact = qcompile.open_artifact(sys.argv[1])
made = artifact.generate(torch.tensor(json.loads(sys.argv[2])), 32, ends=False).tolist()
parts = ("transformers", "torch._dynamo", "torch._inductor", "triton", "accelerate")
heavy = [name for name in sys.modules if name in parts]
print(json.dumps([made, heavy, torch.get_num_threads()]))
"""


@pytest.mark.parametrize("threads", [1, 2])
def test_a_process_of_its_own_loads_no_compiler(gemma: Saved, threads: int) -> None:
    ids = gemma.ids(40)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", RUN, str(gemma.folder), json.dumps(ids.tolist())],
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    made, heavy, found = json.loads(done.stdout)
    assert (heavy, found) == ([], threads)
    assert made[40:] == says(gemma.model, ids, NEW)


def test_the_folder(gemma: Saved) -> None:
    names = {path.name for path in gemma.folder.iterdir()}
    wanted = {"artifact.json", "plan.json", "plan.txt", "weights.safetensors"}
    assert names >= wanted | {"prompt.so", "step.so", "tokenizer.json", "tokenizer_config.json"}
    assert [path.name for path in gemma.folder.parent.iterdir() if path.name[0] == "."] == []
    read_by = {path.stat().st_mode & 0o444 for path in gemma.folder.iterdir()}
    assert len(read_by) == 1
    header = gemma.artifact.header
    assert list(header.sources) == ["m.gguf"]
    assert header.error < 1e-5
    assert json.loads((gemma.folder / "plan.json").read_text())["emitter"] == "ahead of time"
    assert "float32, exact, cpu" in repr(gemma.artifact)
    tokenizer = gemma.artifact.tokenizer
    assert tokenizer("ab").input_ids == [95]
    assert tokenizer.decode([95, 93]) == "aba"


def test_elsewhere_and_read_only(gemma: Saved, tmp_path: Path) -> None:
    place = tmp_path / "else where" / "ünder"
    shutil.copytree(gemma.folder, place)
    for path in (*place.iterdir(), place):
        path.chmod(path.stat().st_mode & ~0o222)
    ids = gemma.ids(9)
    moved = qcompile.open_artifact(place)
    assert torch.equal(moved.generate(ids, 8), gemma.artifact.generate(ids, 8))
    place.chmod(0o755)


def _four_bits(name: str, n: int, k: int, seed: int) -> Packed | None:
    return None if name == "lm_head" else awq(n, k, Awq(32), seed)


def test_a_folder_over_another_artifact_that_is_open(tmp_path: Path) -> None:
    """AWQ, then a mixture of experts in the same place.

    The code of a file is known to the loader by its name: it must not be the old one's.
    """
    config = llama_config(num_hidden_layers=1, attn_implementation="sdpa")
    layers = llama_layers(config, _four_bits)
    write_llama(tmp_path / "awq", config, layers, Awq(32).config)
    first = saved(tmp_path / "awq", tmp_path / "out")
    assert agrees(first, 9) < 1e-5
    assert agrees(first, 20, 1, 1) < 1e-5
    before = first.artifact.generate(first.ids(12), NEW, ends=False)
    types = {f"ffn_{role}_exps.weight": "Q4_0" for role in ("gate", "up", "down")}
    file = gguf_model(tmp_path / "m.gguf", "qwen3moe", types)
    # Another context too: sizes are numbers, whatever was traced in this process before.
    qcompile.export(file, tmp_path / "out", context=600, overwrite=True)
    artifact = qcompile.open_artifact(tmp_path / "out")
    second = Saved(file, artifact, qcompile.load(file, emitter="eager")[0])
    kernels = {e.kernel.name for e in second.model.qcompile.plan.entries if e.kernel}
    assert "cpu.panel_experts" in kernels
    for parts in ((1,), (9,), (40,), (10, 1, 12)):
        assert agrees(second, *parts) < 1e-5, parts
    ids = second.ids(12)
    made = artifact.generate(ids, NEW, ends=False)
    assert made[12:].tolist() == says(second.model, ids, NEW)
    assert torch.equal(first.artifact.generate(first.ids(12), NEW, ends=False), before)
