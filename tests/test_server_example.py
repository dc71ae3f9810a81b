"""``examples/server.py``: requests at once are answered as they are one after another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support.zoo import DATA, ROOT

import qcompile

FILE = DATA / "gguf-q2_k.gguf"
PROMPTS = ["def main", "The sea", "import", "x = 3", "Once there was", "class"]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    command = [sys.executable, str(ROOT / "examples" / "server.py"), str(FILE)]
    process = subprocess.Popen(
        [*command, "--port", "0", "--emitter", "eager"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    yield process.stdout.readline().strip()
    process.kill()
    process.stdout.close()
    process.wait()


def post(address: str, **asked: Any) -> str:
    request = urllib.request.Request(address, json.dumps(asked).encode())
    with urllib.request.urlopen(request, timeout=600) as answer:
        text: str = answer.read().decode()
        return text


def test_requests_at_once(address: str) -> None:
    torch._dynamo.reset()
    loaded: Any = qcompile.load(FILE, emitter="eager")
    model, tokenizer = loaded
    expected = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        made = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
        expected.append(tokenizer.decode(made, skip_special_tokens=True))
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        plain = [pool.submit(post, address, prompt=p, tokens=8) for p in PROMPTS]
        streamed = [pool.submit(post, address, prompt=p, tokens=8, stream=True) for p in PROMPTS]
        assert [json.loads(one.result())["text"] for one in plain] == expected
        assert [one.result() for one in streamed] == expected


@pytest.mark.parametrize("asked", [{}, {"prompt": "x", "tokens": "many"}])
def test_requests_that_are_none(address: str, asked: dict[str, Any]) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(address, **asked)
    assert caught.value.code == 400
    assert "error" in json.load(caught.value)
    caught.value.close()
