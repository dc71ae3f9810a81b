"""One model, several threads: what they get is what one after another would get."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support.texts import text_models
from torch import nn

import qcompile
from qcompile.errors import SchemeError

TEXTS = [
    *("The capital of the country", "In the beginning there was a very small", "He said"),
    *("A list of words", "Once", "There is nothing that can be said of this without more words"),
]


def at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """The results of calls that begin together, each in a thread of its own."""
    gate = threading.Barrier(len(calls))

    def run(call: Callable[[], Any]) -> Any:
        gate.wait(60)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [done.result(300) for done in [pool.submit(run, call) for call in calls]]


@pytest.mark.parametrize("emitter", ["eager", "inductor", "chain"])
def test_generate_in_threads(tmp_path: Path, emitter: str) -> None:
    """From the first call on: threads that meet while nothing is compiled yet."""
    torch._dynamo.reset()
    model, exact, tokenizer = text_models(tmp_path / "model", emitter, 2)
    given = [tokenizer(text, return_tensors="pt") for text in TEXTS]
    options = {"max_new_tokens": 10, "do_sample": False}
    expected = [exact.generate(**ids, **options) for ids in given]
    calls = [functools.partial(model.generate, **ids, **options) for ids in given]
    for _ in range(2):
        made = at_once(calls)
        for one, other in zip(made, expected, strict=True):
            assert torch.equal(one, other)
    graphs = model.qcompile.compiles
    at_once(calls)
    assert model.qcompile.compiles == graphs
    assert torch.backends.mha.get_fastpath_enabled()


def test_two_models_compile_at_once() -> None:
    torch._dynamo.reset()
    models: list[Any] = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        stack = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32)).eval()
        models.append(qcompile.optimize(stack, scheme="rtn", bits=8, group_size=32))
    x = torch.randn(3, 64)
    calls = [functools.partial(model, x) for model in models for _ in range(3)]
    found = at_once(calls)
    for number, model in enumerate(models):
        for made in found[3 * number : 3 * number + 3]:
            assert torch.equal(made, model(x))
    assert [model.qcompile.compiles for model in models] == [1, 1]


def test_an_error_in_one_thread_leaves_the_others_alone(tmp_path: Path) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    source = nn.Sequential(nn.Linear(64, 32)).eval()
    first = qcompile.optimize(source, scheme="rtn", group_size=32, emitter="eager")
    folder = qcompile.save_checkpoint(first, tmp_path / "saved")
    broken = qcompile.optimize(nn.Sequential(nn.Linear(64, 32)), checkpoint=folder, emitter="eager")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[::-1])
    x = torch.randn(2, 64)

    def fails() -> None:
        with pytest.raises(SchemeError, match="changed or removed"):
            broken(x)

    found = at_once([lambda: first(x), fails, lambda: first(x), fails])
    assert torch.equal(found[0], found[2])
