"""What Marlin kernels refuse, what of it they tell, and where a plan chooses them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.lowered import emulated_call
from support.marlin import TARGET, answer, kernel, packed
from support.marlin_ops import LINEAR, installed
from support.weights import random_weight, reference

from qcompile.backends import cuda
from qcompile.backends.cuda import installed as lookup
from qcompile.errors import LowerError
from qcompile.kernel import Accept, Reject
from qcompile.passes.select import select
from qcompile.site import EmbeddingSite, LinearSite
from qcompile.spec import AffineSpec
from qcompile.target import Target

VLLM, SGL, GPTQ16, _GPTQBF = LINEAR


def test_a_package_that_is_missing() -> None:
    spec = AffineSpec(4, 128, "symmetric", torch.float16)
    for target in (Target("cuda", "sm80"), Target("cuda", "sm90"), Target("cuda")):
        said = answer(kernel(4, torch.float16), spec, target=target)
        assert isinstance(said, Reject)
        assert said.reason.startswith("packages vllm, sgl-kernel and gptqmodel are not installed: ")
        assert "_C::marlin_gemm (vllm 0.33.0)" in said.reason
    said = answer(kernel(8, torch.bfloat16), AffineSpec(8, 128, "zero", torch.bfloat16))
    assert isinstance(said, Reject)
    assert said.reason.startswith("package gptqmodel is not installed: the kernel calls gptqmodel_")


@pytest.mark.parametrize(
    ("spec", "target", "text"),
    [
        (AffineSpec(4, 16, "zero"), TARGET, "32, 64, 128 or all of K; the group is 16, K is 256"),
        (AffineSpec(4, 96, "zero"), TARGET, "the group is 96, K is 256 (vllm 0.33.0"),
        (AffineSpec(4, 64, "zero"), Target("cuda", "sm75"), "sm80 or newer; the target is sm75"),
        (AffineSpec(4, 64, "zero"), Target("cpu"), "must be a CUDA device; the target is cpu"),
    ],
)
def test_rules_are_quoted(spec: AffineSpec, target: Target, text: str) -> None:
    with installed(VLLM):
        said = answer(kernel(4, torch.float16), spec, target=target)
    assert isinstance(said, Reject)
    assert text in said.reason


def test_types_are_quoted() -> None:
    with installed(VLLM):
        said = answer(kernel(8, torch.float16), AffineSpec(6, 64, "zero"))
        assert isinstance(said, Reject)
        assert said.reason.startswith("package gptqmodel is not installed")
    one = replace(kernel(4, torch.float16), activations=torch.float32)
    with installed(VLLM):
        said = answer(one, AffineSpec(4, 64, "zero"))
    assert isinstance(said, Reject)
    assert "must be float16 or bfloat16; they are float32" in said.reason


def test_padding_and_the_gather_are_told() -> None:
    with installed(VLLM):
        said = answer(kernel(4, torch.float16), AffineSpec(4, 64, "zero", torch.float16), 100, 200)
        assert isinstance(said, Accept)
        assert said.note == "_C::marlin_gemm, padded from 100 x 200 to 128 x 256"
        said = answer(kernel(4, torch.float16), AffineSpec(4, 64, "zero", torch.float16))
        assert isinstance(said, Accept)
        assert said.note == "_C::marlin_gemm"


def test_the_schema_decides() -> None:
    one, spec = kernel(4, torch.float16), AffineSpec(4, 64, "symmetric", torch.float16)
    older = VLLM.schema.replace(", Tensor? a_scales", "")
    with installed(VLLM, schema=older):
        said = answer(one, spec)
        assert isinstance(said, Reject)
        assert "_C::marlin_gemm is _C::marlin_gemm(Tensor a, " in said.reason
        assert "not the one of vllm 0.33.0: _C::marlin_gemm(Tensor a" in said.reason
        with installed(SGL):
            said = answer(one, spec)
            assert isinstance(said, Accept)
            assert said.note == "sgl_kernel::gptq_marlin_gemm"


def test_the_first_that_fits_is_called() -> None:
    weight = random_weight(AffineSpec(8, 64, "zero", torch.float16), 64, 128)
    one, x = kernel(8, torch.float16), torch.randn(3, 128).half()
    run = emulated_call(one, packed(one, weight), None)
    with installed(VLLM) as first, installed(GPTQ16) as second:
        run(x)
    assert (len(first), len(second)) == (0, 1)


def test_a_graph_without_its_package_says_so() -> None:
    weight = random_weight(AffineSpec(4, 64, "zero", torch.float16), 64, 128)
    one = kernel(4, torch.float16)
    run = emulated_call(one, packed(one, weight), None)
    with pytest.raises(LowerError, match="not installed: the kernel calls"):
        run(torch.randn(3, 128).half())
    with (
        installed(VLLM),
        pytest.raises(LowerError, match=r"bfloat16, scales of torch\.float16"),
    ):
        run(torch.randn(3, 128).bfloat16())


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package ``vllm`` that is installed."""
    folder = tmp_path / "vllm"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('nothing of it shall run')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    lookup._load.cache_clear()
    yield folder
    lookup._load.cache_clear()


def test_libraries_of_an_installed_package(package: Path) -> None:
    spec = AffineSpec(4, 64, "symmetric", torch.bfloat16)
    said = answer(kernel(4, torch.bfloat16), spec)
    assert isinstance(said, Reject)
    assert "vllm is installed, but it has no _C_stable_libtorch*.so or _C.*.so" in said.reason
    assert "package gptqmodel is not installed" in said.reason
    lookup._load.cache_clear()
    (package / "_C_stable_libtorch.abi3.so").write_bytes(b"no library")
    said = answer(kernel(4, torch.bfloat16), spec)
    assert isinstance(said, Reject)
    assert "but _C_stable_libtorch.abi3.so does not load: " in said.reason


# **** plans ****


def chosen(spec: AffineSpec, *sites: str) -> list[str | None]:
    """The kernels of sites that share a weight."""
    ref = reference(random_weight(spec, 128, 256))
    made = [LinearSite("p", ref) if s == "linear" else EmbeddingSite("p", ref) for s in sites]
    entries = select(made, cuda.kernels(torch.float16), TARGET)
    return [None if entry.kernel is None else entry.kernel.name for entry in entries]


def test_it_is_chosen_where_it_is_installed() -> None:
    four = AffineSpec(4, 64, "zero", torch.float16)
    assert chosen(four, "linear") == ["cuda.triton_linear"]
    with installed(VLLM):
        assert chosen(four, "linear") == ["cuda.marlin4"]
        assert chosen(AffineSpec(8, 64, "symmetric", torch.float16), "linear") == ["cuda.marlin8"]
        # Two bits are stored in four, which takes longer to read than the planes of Triton.
        assert chosen(AffineSpec(2, 64, "symmetric"), "linear") == ["cuda.triton_linear"]
        assert chosen(AffineSpec(4, 16, "zero"), "linear") == ["cuda.triton_linear"]
        # One packed copy serves a tied embedding too.
        shared = chosen(four, "linear", "embedding")
        assert shared == ["cuda.triton_linear", "cuda.triton_embedding"]
