"""``verify`` measures every site and names a kernel that computes wrongly."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from support.kernels import FakeKernel
from support.weights import random_weight, reference

from qcompile.errors import VerifyError
from qcompile.kernel import Kernel
from qcompile.passes.select import Policy, select
from qcompile.plans import Plan
from qcompile.session import Session
from qcompile.site import EmbeddingSite, LinearSite, Site
from qcompile.spec import AffineSpec
from qcompile.target import Target
from qcompile.verify import verify_session

TARGET = Target("cpu", "generic")


@dataclass(frozen=True)
class Device:
    """A backend of given kernels."""

    KERNELS: tuple[Kernel, ...]

    def default_target(self) -> Target:
        return TARGET

    def compiler(self) -> str:
        return "eager"

    def prepare(self) -> None:
        """Nothing to build."""


def session(
    *kernels: FakeKernel, dtype: torch.dtype = torch.float32, policy: Policy = "error"
) -> Session:
    spec = AffineSpec(4, 16, "offset")
    shapes = {"embed": (40, 32), "up": (64, 32), "down": (32, 64)}
    weights = {
        name: reference(random_weight(spec, n, k), f"{name}.weight")
        for name, (n, k) in shapes.items()
    }
    sites: list[Site] = [
        EmbeddingSite("embed", weights["embed"]),
        LinearSite("up", weights["up"]),
        LinearSite("down", weights["down"]),
        LinearSite("head", weights["embed"]),
    ]
    device = Device(tuple(kernels))
    entries = select(sites, device.KERNELS, TARGET, policy, dtype)
    plan = Plan(TARGET, "gguf", "model.gguf", entries)
    return Session({w.name: w for w in weights.values()}, device, plan, {}, dtype, policy)


def rows(factor: float = 1.0) -> FakeKernel:
    return FakeKernel("fake.rows", "embedding", factor=factor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_right_kernels_pass(dtype: torch.dtype) -> None:
    made = session(rows(), FakeKernel("fake.linear"), dtype=dtype)
    errors = verify_session(made)
    assert made.verification == errors
    assert {error.site for error in errors} == {"embed", "up", "down", "head"}
    assert all(error.relative_l2 == 0.0 for error in errors)


def test_a_wrong_kernel_is_named_and_the_worst_comes_first() -> None:
    made = session(rows(1.002), FakeKernel("fake.linear", factor=1.5))
    with pytest.raises(VerifyError) as caught:
        verify_session(made)
    assert "4 of 4 sites" in caught.value.found
    assert "fake.linear" in caught.value.fix
    assert caught.value.where.endswith("(model.gguf)")
    assert [error.kernel for error in made.verification] == ["fake.linear"] * 3 + ["fake.rows"]
    assert made.verification[-1].relative_l2 == pytest.approx(0.002, rel=1e-2)
    assert "5.00e-01" in caught.value.reasons[0]


@pytest.mark.parametrize("factor", [math.nan, math.inf, -1.0, 0.0])
def test_any_nonsense_is_caught(factor: float) -> None:
    with pytest.raises(VerifyError, match="embed"):
        verify_session(session(rows(factor), FakeKernel("fake.linear")))


def test_what_is_no_number_is_the_worst() -> None:
    made = session(rows(math.nan), FakeKernel("fake.linear", factor=1.5))
    with pytest.raises(VerifyError, match=r"^embed "):
        verify_session(made)
    assert math.isnan(made.verification[0].relative_l2)


def test_an_error_within_the_declared_tolerance_passes() -> None:
    errors = verify_session(session(rows(), FakeKernel("fake.linear", factor=1 + 5e-6)))
    assert errors[0].kernel == "fake.linear"
    assert 1e-6 < errors[0].relative_l2 < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dequantized_sites_are_measured_too(dtype: torch.dtype) -> None:
    errors = verify_session(session(dtype=dtype, policy="dequantize"))
    assert {error.kernel for error in errors} == {"dequantized"}
    assert all(error.relative_l2 < 1e-2 for error in errors)
    if dtype is torch.float32:
        assert all(error.relative_l2 < 1e-6 for error in errors)
