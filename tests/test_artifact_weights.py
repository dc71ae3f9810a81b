"""The file of an artifact's weights: what it can hold, and that it is held once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qcompile.artifact_weights import Tensors, read_weights
from qcompile.errors import ArtifactError, LowerError
from qcompile.memory import Slabs


def stored(path: Path, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Tensors written and read again, in their order."""
    kept = Tensors()
    numbers = [kept.number(tensor) for tensor in tensors]
    kept.write(path, "mark")
    found = read_weights(path, kept.nbytes, "mark")
    assert sorted(found) == sorted(set(numbers))
    return [found[number] for number in numbers]


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def test_every_kind_of_tensor(tmp_path: Path) -> None:
    slabs = Slabs()
    side_by_side = [slabs.empty((3,), torch.float32).fill_(n) for n in range(3)]
    floats = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn)
    integers = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
    given = [
        *side_by_side,
        *(torch.randn(2, 3).to(dtype) for dtype in floats),
        *(torch.tensor([1, 0, 1]).to(dtype) for dtype in integers),
        torch.tensor(2.5),
        torch.empty(0),
        torch.empty(3, 0, dtype=torch.int8),
        torch.randn(1000, 2100),  # more than is mapped at once
        torch.nn.Parameter(torch.randn(4)).detach(),
    ]
    found = stored(tmp_path / "w.safetensors", *given)
    for one, other in zip(given, found, strict=True):
        assert one.dtype is other.dtype
        assert one.shape == other.shape
        assert _bytes(one) == _bytes(other)
    assert all(tensor.data_ptr() not in {t.data_ptr() for t in given} for tensor in found[:3])


def test_parts_of_one_storage(tmp_path: Path) -> None:
    whole = torch.arange(12.0).view(3, 4)
    given = (whole[0], whole[1:], whole, whole.view(-1), whole.view(torch.int32), whole[0])
    found = stored(tmp_path / "w.safetensors", *given)
    for one, other in zip(given, found, strict=True):
        assert torch.equal(one, other)
    assert found[0] is found[5]
    assert found[2].data_ptr() != found[3].data_ptr()


def test_what_is_shared_is_stored_once() -> None:
    kept, one, other = Tensors(), torch.randn(4), torch.randn(4)
    assert [kept.number(t) for t in (one, other, one, one.detach(), one.view(4))] == [0, 1, 0, 0, 0]
    assert kept.nbytes == 32


@pytest.mark.parametrize(
    "tensor",
    [torch.randn(2, 3).t(), torch.zeros(2, dtype=torch.complex64)],
    ids=["turned", "dtype"],
)
def test_what_a_file_cannot_hold(tensor: torch.Tensor) -> None:
    with pytest.raises(LowerError, match="a constant of the graph"):
        Tensors().number(tensor)


def test_another_file(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    stored(path, torch.randn(4))
    for nbytes, mark in ((17, "mark"), (16, "other")):
        with pytest.raises(ArtifactError):
            read_weights(path, nbytes, mark)
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask(tmp_path)


def _umask(folder: Path) -> int:
    (folder / "plain").touch()
    return 0o666 & ~(folder / "plain").stat().st_mode
