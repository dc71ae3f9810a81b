"""Modules and inputs that are not the usual ones."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.small import exact_copy, write_module
from torch import nn
from torch.nn import functional

import qcompile
from qcompile.backends.cpu.probe import find_compiler
from qcompile.errors import CaptureError, LowerError, OptionError
from qcompile.passes import NAMES

Formula = Callable[..., Any]


class Model(nn.Module):
    """An embedding, two linears, a bare parameter and a formula that uses them."""

    def __init__(self, formula: Formula) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.e = nn.Embedding(50, 64)
        self.p = nn.Linear(64, 64)
        self.q = nn.Linear(64, 7, bias=False)
        self.w = nn.Parameter(torch.randn(32, 64))
        self.formula = formula

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.formula(self, *args, **kwargs)


class Doubling(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


def compiled(tmp_path: Path, formula: Formula, **options: Any) -> tuple[Any, nn.Module]:
    torch._dynamo.reset()
    path = write_module(tmp_path / "odd.gguf", Model(formula), {}, "Q8_0")
    settings = {"emitter": "eager", **options}
    model: Any = qcompile.optimize(Model(formula), checkpoint=path, **settings)
    return model, exact_copy(path, Model(formula))


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


IDS = torch.tensor([[1, 2, 49], [0, 0, 7]])
FORMULAS: dict[str, tuple[Formula, list[torch.Tensor]]] = {
    "any shape": (lambda m, x: m.q(m.p(x)), [rand(64), rand(2, 1, 3, 64)]),
    "any batch": (lambda m, x: m.p(x), [rand(0, 64), rand(1, 64), rand(2, 64), rand(9, 64)]),
    "empty in the middle": (lambda m, x: m.p(x), [rand(2, 0, 64)]),
    "strides": (lambda m, x: m.p(x[:, ::2]), [rand(5, 128)]),
    "a linear twice": (lambda m, x: m.p(m.p(x)), [rand(3, 64)]),
    "with and without its bias": (
        lambda m, x: functional.linear(x, m.p.weight) + m.p(x),
        [rand(3, 64)],
    ),
    "as embedding and as linear": (
        lambda m, ids: functional.linear(m.e(ids), m.e.weight),
        [IDS, IDS[0, 0], IDS[:0], IDS.int(), IDS[:, :1]],
    ),
    "two lookups": (lambda m, ids: m.e(ids) + m.e(ids // 2), [IDS]),
    "t": (lambda m, x: x @ m.w.t(), [rand(3, 64), rand(2, 3, 64)]),
    "T twice": (lambda m, x: (x @ m.w.T, 2 * (x @ m.w.T)), [rand(3, 64)]),
    "addmm": (lambda m, x: torch.addmm(m.p.bias, x, m.p.weight.transpose(0, 1)), [rand(3, 64)]),
    "shape and dtype of a weight": (
        lambda m, x: m.p(x.to(m.p.weight.dtype)) * m.w.shape[0],
        [rand(3, 64)],
    ),
    "structures": (lambda m, x: {"a": [m.p(x)], "b": (m.q(x), None)}, [rand(3, 64)]),
    "no weight at all": (lambda m, x: x + 1, [rand(3, 64)]),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_formula(tmp_path: Path, name: str) -> None:
    formula, inputs = FORMULAS[name]
    model, exact = compiled(tmp_path, formula)
    for given in inputs:
        close(model(given), exact(given))


@pytest.mark.parametrize("name", ["as embedding and as linear", "t"])
def test_the_same_through_the_backend_by_name(tmp_path: Path, name: str) -> None:
    formula, inputs = FORMULAS[name]
    _, exact = compiled(tmp_path, formula)
    options: Any = {"checkpoint": str(tmp_path / "odd.gguf"), "emitter": "eager"}
    model = torch.compile(Model(formula), backend="qcompile", options=options)
    with torch.no_grad():
        close(model(inputs[0]), exact(inputs[0]))


def test_keywords_and_numbers(tmp_path: Path) -> None:
    model, exact = compiled(tmp_path, lambda m, *, x, scale=1.0, last=False: m.p(x) * scale)
    for given in ({}, {"scale": 2.5, "last": True}):
        close(model(x=rand(3, 64), **given), exact(x=rand(3, 64), **given))


def test_modes(tmp_path: Path) -> None:
    model, exact = compiled(tmp_path, lambda m, x: functional.dropout(m.p(x), 0.5, m.training))
    x = rand(3, 64)
    close(model.eval()(x), exact(x))
    assert (model.train()(x) == 0).any()
    close(model.eval()(x), exact(x))
    with torch.inference_mode():
        close(model(x), exact(x))
    close(model(x.clone().requires_grad_()), exact(x))
    with pytest.raises(OptionError, match="gradient"):
        model(x.clone().requires_grad_()).sum().backward()


@pytest.mark.parametrize("inside", [True, False])
def test_autocast(tmp_path: Path, inside: bool) -> None:
    def formula(m: Any, x: torch.Tensor) -> Any:
        if not inside:
            return m.p(x)
        with torch.autocast("cpu", torch.bfloat16):
            return m.p(x)

    model, exact = compiled(tmp_path, formula)
    with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        found, expected = model(rand(3, 64)), exact(rand(3, 64))
    assert found.dtype is expected.dtype is torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_a_subclass_of_linear(tmp_path: Path) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(Doubling(64, 32))
    path = write_module(tmp_path / "sub.gguf", model, {}, "Q8_0")
    found: Any = qcompile.optimize(nn.Sequential(Doubling(64, 32)), checkpoint=path)
    close(found(rand(3, 64)), exact_copy(path, model)(rand(3, 64)))


def test_graph_breaks_where_they_are_allowed(tmp_path: Path) -> None:
    def formula(m: Any, x: torch.Tensor) -> Any:
        y = m.p(x)
        return m.q(y) if y.sum() > 0 else m.q(-y)

    model, exact = compiled(tmp_path, formula, fullgraph=False)
    for x in (rand(3, 64), -rand(3, 64)):
        close(model(x), exact(x))


def test_threads(tmp_path: Path) -> None:
    model, exact = compiled(tmp_path, lambda m, x: m.q(m.p(x)))
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(model(rand(3, 64)))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    for one in found:
        close(one, exact(rand(3, 64)))


@pytest.mark.parametrize(
    ("formula", "use"),
    [
        (lambda m, x: functional.linear(x, m.w[:8]), "getitem"),
        (lambda m, x: x @ m.p.weight, "matmul"),
        (lambda m, x: m.p(x) + m.p.weight.mean(), "mean"),
    ],
)
def test_another_use_of_a_weight_is_named(tmp_path: Path, formula: Formula, use: str) -> None:
    model, _ = compiled(tmp_path, formula)
    with pytest.raises(CaptureError, match=use):
        model(rand(3, 64))
    model, exact = compiled(tmp_path, formula, on_unsupported="dequantize")
    close(model(rand(3, 64)), exact(rand(3, 64)))


# **** the environment ****


@pytest.mark.skipif(not find_compiler(), reason="no C++ compiler")
def test_what_a_native_op_refuses_is_told_as_other_errors_are(tmp_path: Path) -> None:
    model, _ = compiled(tmp_path, lambda m, x: m.p(x))
    with pytest.raises(LowerError, match="float32, float16 or bfloat16") as caught:
        model(rand(3, 64).double())
    assert "csrc" not in str(caught.value)


def test_dump_and_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("QCOMPILE_DUMP", str(tmp_path / "dump"))
    monkeypatch.setenv("QCOMPILE_LOG", "passes,plan")
    monkeypatch.setenv("QCOMPILE_CHECK", "1")
    model, _ = compiled(tmp_path, lambda m, x: m.p(x))
    with caplog.at_level("INFO", logger="qcompile"):
        model(rand(3, 64))
    names = sorted(path.name.split(".", 1)[1] for path in (tmp_path / "dump").glob("*.py"))
    passes = sorted(NAMES)
    assert names == [f"{name}.{when}.py" for name in passes for when in ("after", "before")]
    [lowered] = (tmp_path / "dump").glob("*.lower.after.py")
    assert "panel_linear" in lowered.read_text(encoding="utf-8")
    assert "plan  " in (tmp_path / "dump" / "plan.txt").read_text(encoding="utf-8")
    topics = {message.split(":")[0] for message in caplog.messages}
    assert topics == {"passes", "plan"}


@pytest.mark.parametrize(
    ("variable", "value", "error", "message"),
    [
        ("QCOMPILE_LOG", "plans", OptionError, "did you mean 'plan'"),
        ("QCOMPILE_SKIP", "lowr", OptionError, "did you mean 'lower'"),
        ("QCOMPILE_CHECK", "yes", OptionError, "some of 0, 1"),
        ("QCOMPILE_DUMP", str(Path(__file__, "dump")), OptionError, "cannot be written"),
        ("QCOMPILE_SKIP", "lower", qcompile.LowerError, "was not lowered"),
        ("QCOMPILE_SKIP", "quantize.swap", CaptureError, "p.weight"),
        ("QCOMPILE_SKIP", "canonicalize.linear", CaptureError, "p.weight"),
    ],
)
def test_settings_that_cannot_work(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    error: type[Exception],
    message: str,
) -> None:
    model, _ = compiled(tmp_path, lambda m, x: m.p(x))
    monkeypatch.setenv(variable, value)
    with pytest.raises(error, match=message):
        model(rand(3, 64))


def test_a_skipped_pass_that_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, exact = compiled(tmp_path, lambda m, x: m.p(x))
    monkeypatch.setenv("QCOMPILE_SKIP", "canonicalize.embedding")
    close(model(rand(3, 64)), exact(rand(3, 64)))
