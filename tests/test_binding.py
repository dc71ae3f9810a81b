import pytest
import torch
from torch import nn

from qcompile.binding import bind, check_identity
from qcompile.errors import SchemeError
from qcompile.layout import QuantizedTensor
from qcompile.spec import FloatSpec
from qcompile.weight import WeightRef


def _weight(name: str, *shape: int) -> WeightRef:
    spec = FloatSpec(torch.float32)

    def read(rows: object) -> QuantizedTensor:
        raise AssertionError("binding read a weight")

    return WeightRef(name, spec, "float", shape, read, source=f"file: {name}")


def test_every_parameter_gets_the_tensor_of_its_name() -> None:
    bound = bind({"a": (2,), "b": (3,)}, {"b": _weight("y", 3), "a": _weight("x", 2)}, "file")
    assert [(name, ref.name, ref.source) for name, ref in bound.items()] == [
        ("a", "a", "file: x"),
        ("b", "b", "file: y"),
    ]


def test_unmatched_names_of_both_sides_are_listed() -> None:
    tensors = {name: _weight(name, 1) for name in ("a", "p", "q", "r", "s")}
    with pytest.raises(SchemeError) as caught:
        bind({"a": (1,), "x": (1,), "y": (1,)}, tensors, "model.gguf")
    text = str(caught.value)
    assert "missing in the checkpoint: x, y" in text
    assert "unused in the checkpoint:  p, q, r and 1 more" in text


def test_a_wrong_shape_names_tensor_found_and_needed() -> None:
    with pytest.raises(SchemeError) as caught:
        bind({"a": (2, 3)}, {"a": _weight("t", 3, 2)}, "model.gguf")
    text = str(caught.value)
    assert "file: t" in text
    assert "(3, 2)" in text
    assert "(2, 3) for the parameter a" in text


def test_an_alias_needs_no_tensor_but_takes_one() -> None:
    shapes = {"embed": (4, 2), "head": (4, 2)}
    aliases = {"head": "embed"}
    assert set(bind(shapes, {"embed": _weight("e", 4, 2)}, "f", aliases)) == {"embed"}
    both = {"embed": _weight("e", 4, 2), "head": _weight("h", 4, 2)}
    assert set(bind(shapes, both, "f", aliases)) == {"embed", "head"}
    with pytest.raises(SchemeError, match="missing in the checkpoint: head"):
        bind({"head": (4, 2)}, {}, "f", aliases)


class _Tied(nn.Module):
    def __init__(self, *, tie: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.head = nn.Linear(2, 4, bias=False)
        if tie:
            self.head.weight = self.embed.weight


def test_a_head_without_tensor_must_be_tied() -> None:
    catalogue = {"embed.weight": _weight("e", 4, 2)}
    check_identity(_Tied(tie=True), catalogue, "f")
    check_identity(_Tied(tie=False), catalogue, "f", kept=["head.weight"])
    with pytest.raises(SchemeError) as caught:
        check_identity(_Tied(tie=False), catalogue, "f")
    assert "head.weight" in str(caught.value)
    assert "tie_word_embeddings=True" in str(caught.value)
    assert "a checkpoint that stores" in str(caught.value)


def test_a_tied_head_must_not_have_a_tensor_of_its_own() -> None:
    catalogue = {"embed.weight": _weight("e", 4, 2), "head.weight": _weight("h", 4, 2)}
    check_identity(_Tied(tie=False), catalogue, "f")
    with pytest.raises(SchemeError, match="tie_word_embeddings=False"):
        check_identity(_Tied(tie=True), catalogue, "f")
