"""What one model does to the next in a process, and what is left when a call fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.zoo import relative_l2, zoo_entry
from torch import nn

import qcompile
from qcompile.errors import OptionError, SchemeError


class Counted(nn.Module):
    """A linear, and a buffer that is no float."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(64, 32)
        self.register_buffer("seen", torch.tensor(2**40 + 1))
        self.register_buffer("mask", torch.ones(32, dtype=torch.bool))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x) * self.get_buffer("mask")  # type: ignore[no-any-return]


def test_models_do_not_share_a_limit_of_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each model has dynamo's cache to itself: graphs of models that are gone do not count."""
    torch._dynamo.reset()
    monkeypatch.setattr("qcompile.dynamo._GRAPHS", 3)
    for seed in range(6):
        torch.manual_seed(seed)
        model: Any = qcompile.optimize(
            nn.Sequential(nn.Linear(32, 32)), scheme="rtn", group_size=32, emitter="eager"
        )
        x = torch.randn(3, 32)
        weight = model.qcompile.catalogue["0.weight"].dequantize()
        torch.testing.assert_close(model(x), x @ weight.T + model[0].bias, rtol=1e-4, atol=1e-4)
        assert model.qcompile.compiles == 1


def test_an_interrupted_quantizer_says_that_the_model_is_gone() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).eval()

    def stop(name: str, done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        qcompile.optimize(model, scheme="rtn", emitter="eager", progress=stop)
    with pytest.raises(OptionError, match="interrupted"):
        qcompile.optimize(model, scheme="rtn", emitter="eager")


def test_buffers_that_are_no_floats_come_back(tmp_path: Path) -> None:
    model = qcompile.optimize(Counted().eval(), scheme="rtn", group_size=32, emitter="eager")
    folder = qcompile.save_checkpoint(model, tmp_path / "saved")
    other = Counted().eval()
    other.get_buffer("seen").zero_()
    other.get_buffer("mask").zero_()
    loaded = qcompile.optimize(other, checkpoint=folder, emitter="eager")
    assert torch.equal(loaded.get_buffer("seen"), torch.tensor(2**40 + 1))
    x = torch.randn(2, 64)
    assert torch.equal(loaded(x), model(x))


class Turned(nn.Module):
    """A square linear that keeps its weight the other way round."""

    def __init__(self) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        self.proj = transformers.pytorch_utils.Conv1D(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x)  # type: ignore[no-any-return]


def test_a_conv1d_takes_the_checkpoint_that_was_made_of_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = qcompile.optimize(Turned().eval(), scheme="rtn", group_size=32, emitter="eager")
    x = torch.randn(3, 64)
    expected = model(x)
    folder = qcompile.save_checkpoint(model, tmp_path / "saved")
    fresh = qcompile.optimize(Turned().eval(), checkpoint=folder, emitter="eager")
    assert relative_l2(fresh(x), expected) < 1e-6
    untouched = Turned().eval()
    compiled = torch.compile(
        untouched, backend="qcompile", options={"checkpoint": str(folder), "scheme": "gptq"}
    )
    with pytest.raises(Exception, match="Conv1D"):
        compiled(x)
    with pytest.raises(OptionError):
        qcompile.optimize(untouched, checkpoint=folder, emulate=True)
    assert type(untouched.proj).__name__ == "Conv1D"


class Block(nn.Module):
    """A block whose experts use the usual names the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Identity()])


def test_names_of_one_class_say_nothing_of_another() -> None:
    """Registered roles hold for lists of that class, not for every folder that is read."""
    from qcompile import register

    before = dict(register._KNOWN)
    try:
        qcompile.register_experts(Block, lambda self, x: x, gate="up_proj", up="gate_proj")
        entry = zoo_entry("moe-gptq-w4-g128-sym", "gptq:gptq", "moe")
        torch._dynamo.reset()
        model: Any = qcompile.load(entry.path, emitter="eager")[0]
        ids = torch.tensor([entry.sequences["16"]])
        expected = torch.from_numpy(entry.references["exact_logits_16"])
        assert relative_l2(model(ids).logits[0, -16:], expected) < 1e-5
    finally:
        register._KNOWN.clear()
        register._KNOWN.update(before)


def test_a_quantizer_takes_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="rtn rounds"):
        qcompile.optimize(nn.Linear(8, 8), scheme="rtn", checkpoint=tmp_path)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e9])
def test_a_weight_that_cannot_be_rounded_is_found_before_any_other_is_gone(bad: float) -> None:
    model: Any = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8)).eval()
    with torch.no_grad():
        model[1].weight[0, 0] = bad
    before = model[0].weight
    with pytest.raises(OptionError, match=r"1\.weight"):
        qcompile.optimize(model, scheme="rtn", emitter="eager")
    assert model[0].weight is before


def test_a_bare_linear() -> None:
    model, plain = nn.Linear(64, 32).eval(), nn.Linear(64, 32).eval()
    plain.load_state_dict(model.state_dict())
    compiled = qcompile.optimize(model, scheme="rtn", bits=8, emitter="eager")
    x = torch.randn(3, 64)
    with torch.no_grad():
        assert relative_l2(compiled(x), plain(x)) < 0.01


def test_an_encoder_layer_of_torch() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()
    x = torch.randn(2, 5, 64)
    with torch.no_grad():
        expected = layer(x)
    fast = torch.backends.mha.get_fastpath_enabled()
    compiled = qcompile.optimize(nn.Sequential(layer), scheme="rtn", bits=8, emitter="eager")
    assert relative_l2(compiled(x), expected) < 0.02
    assert torch.backends.mha.get_fastpath_enabled() == fast


class Named(nn.Module):
    """A module whose forward calls itself otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(64, 32)

    def forward(this, x: torch.Tensor) -> torch.Tensor:
        return this.proj(x)  # type: ignore[no-any-return]


def test_the_backend_finds_a_module_by_its_place(tmp_path: Path) -> None:
    model = qcompile.optimize(Named().eval(), scheme="rtn", group_size=32, emitter="eager")
    folder = qcompile.save_checkpoint(model, tmp_path / "saved")
    options: Any = {"checkpoint": str(folder), "scheme": "gptq", "emitter": "eager"}
    compiled = torch.compile(Named().eval(), backend="qcompile", options=options)
    x = torch.randn(2, 64)
    with torch.no_grad():
        assert relative_l2(compiled(x), model(x)) < 1e-5


@pytest.mark.parametrize("arguments", [(3,), (None,), (b"/tmp",), ("",), ("x", None)])
def test_what_is_no_path_or_scheme(arguments: Any) -> None:
    with pytest.raises(OptionError):
        qcompile.open(*arguments)


def test_a_file_that_changes_before_it_is_read(tmp_path: Path) -> None:
    folders = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = qcompile.optimize(
            nn.Sequential(nn.Linear(64, 32)), scheme="rtn", group_size=32, emitter="eager"
        )
        folders.append(qcompile.save_checkpoint(model, tmp_path / str(seed)))
    waiting = qcompile.optimize(
        nn.Sequential(nn.Linear(64, 32)), checkpoint=folders[0], emitter="eager"
    )
    name = "model.safetensors"
    (folders[0] / name).write_bytes((folders[1] / name).read_bytes())
    with pytest.raises(SchemeError, match="changed or removed"):
        waiting(torch.randn(2, 64))


def test_linears_without_shape_or_columns_are_left_alone() -> None:
    with pytest.warns(UserWarning, match="zero-element"):
        model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 0)).eval()
    compiled = qcompile.optimize(model, scheme="rtn", group_size=32, emitter="eager")
    assert compiled(torch.randn(2, 64)).shape == (2, 0)
    lazy = nn.Sequential(nn.Linear(64, 32), nn.LazyLinear(4)).eval()
    with pytest.raises(OptionError):
        qcompile.optimize(lazy[1:], scheme="rtn")


def test_an_open_checkpoint_has_its_own_scheme(tmp_path: Path) -> None:
    model = qcompile.optimize(nn.Sequential(nn.Linear(64, 32)), scheme="rtn", emitter="eager")
    opened = qcompile.open(qcompile.save_checkpoint(model, tmp_path / "saved"))
    with pytest.raises(OptionError, match="opened as gptq"):
        qcompile.optimize(nn.Sequential(nn.Linear(64, 32)), scheme="awq", checkpoint=opened)
